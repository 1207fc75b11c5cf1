"""What a request may ask of its trees, and the errors that name the key."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests.engine.engines import DRAFT, TARGET
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.request_flags import varying
from vllm_adaptive_tree.engine.common.request_options import RequestOptions
from vllm_adaptive_tree.engine.names import MARK
from vllm_adaptive_tree.methods import resolve

METHODS: dict[str, dict[str, Any]] = {
    "adaptive_tree": {},
    "adaptive_tree whole": {"budget": None},
    "opt_tree": {},
    "dyspec": {"budget": None},
    "static_tree": {"budget": None},
}


def test_as_a_mapping_and_as_text() -> None:
    wanted = RequestOptions(nodes=8, kind="chosen", seed="reproducible")
    assert RequestOptions.parse({"nodes": 8, "kind": "chosen", "seed": "reproducible"}) == wanted
    assert RequestOptions.parse('{"nodes": 8, "kind": "chosen", "seed": "reproducible"}') == wanted
    assert {RequestOptions.parse(off) for off in (False, 0, "false")} == {RequestOptions(nodes=0)}
    assert {RequestOptions.parse(on) for on in (True, 1, "true", {}, "{}")} == {RequestOptions()}
    assert RequestOptions.of(SamplingParams(extra_args={"other": 1})) == RequestOptions()
    assert RequestOptions(nodes=0).names == ["off"]
    assert wanted.names == ["nodes", "chosen", "reproducible"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"extra_args\['tree'\] .* must be false"),
        ("off", "or JSON text of them, got 'off'"),
        ([8], "must be false"),
        (2, "must be false"),
        ({"node": 8}, "the key 'node' is unknown; known keys: nodes, kind, seed"),
        ({"nodes": 0}, r"\['nodes'\] must be a whole number of at least 1.* \(false in place"),
        ({"nodes": True}, r"\['nodes'\] must be"),
        ('{"nodes": 2.5}', r"\['nodes'\] must be"),
        ({"kind": "one_hot"}, r"\['kind'\] must be 'chosen' or 'drawn'"),
        ({"seed": 5}, r"\['seed'\] must be 'reproducible'"),
        ("[" * 100_000, r"or JSON text of them, got .{,40}$"),
        ({"n" * 100_000: 1}, r"the key .{,40} is unknown"),
    ],
)
def test_bad_values(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RequestOptions.parse(given)


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    def config(method: str, options: dict[str, Any]) -> Any:
        about = {"method": method.split()[0], "model": DRAFT, "num_speculative_tokens": 12, "tree": options}
        arguments = EngineArgs(TARGET, dtype="float32", max_model_len=512, max_num_seqs=16, speculative_config=about)
        return arguments.create_engine_config().speculative_config

    return {name: config(name, options) for name, options in METHODS.items()}


REPRODUCIBLE = {"seed": "reproducible"}
SEEDED = {"temperature": 1.0, "seed": 7}
REFUSED: list[tuple[str, dict[str, Any], Any, str]] = [
    ("opt_tree", {}, {"kind": "drawn"}, "children of 'opt_tree' with 'target_only' are 'chosen': remove it"),
    ("static_tree", {}, {"kind": "chosen"}, "children of 'static_tree' with 'traversal' are 'drawn'"),
    ("adaptive_tree", {"temperature": 0}, {"kind": "drawn"}, "temperature 0 or a seed"),
    ("adaptive_tree", SEEDED, {"kind": "drawn"}, "temperature 0 or a seed"),
    ("static_tree", {}, REPRODUCIBLE, "the request has no seed: give it one"),
    ("adaptive_tree", SEEDED, REPRODUCIBLE, r"a budget cuts them: .*'budget': null"),
    ("adaptive_tree whole", SEEDED, REPRODUCIBLE, "'adaptive_tree' learns from all requests"),
    ("dyspec", SEEDED, REPRODUCIBLE, "'auto' steers 'dyspec'"),
    ("static_tree", {}, "off", "JSON text"),
]
ALLOWED: list[tuple[str, dict[str, Any], Any]] = [
    ("opt_tree", {}, False),
    ("opt_tree", SEEDED, {"nodes": 3, "kind": "chosen", **REPRODUCIBLE}),
    ("adaptive_tree", {"temperature": 1.0}, {"kind": "drawn"}),
    ("adaptive_tree", {"temperature": 1.0}, {"kind": "chosen"}),
    ("adaptive_tree", SEEDED, {"kind": "chosen", **REPRODUCIBLE}),
    ("static_tree", SEEDED, {"kind": "drawn", **REPRODUCIBLE}),
]


@pytest.mark.parametrize(("method", "sampling", "asked", "words"), REFUSED)
def test_what_an_engine_cannot_give(
    engines: dict[str, Any], method: str, sampling: dict[str, Any], asked: Any, words: str
) -> None:
    params = SamplingParams(**sampling, extra_args={"tree": asked})
    with pytest.raises(VLLMValidationError, match=words) as error:
        params._validate_spec_decode(engines[method])
    assert error.value.parameter == "vllm_xargs"


@pytest.mark.parametrize(("method", "sampling", "asked"), ALLOWED)
def test_what_it_can(engines: dict[str, Any], method: str, sampling: dict[str, Any], asked: Any) -> None:
    SamplingParams(**sampling, extra_args={"tree": asked})._validate_spec_decode(engines[method])


def test_room_for_whole_trees() -> None:
    about = {"method": "static_tree", "model": DRAFT, "num_speculative_tokens": 12, "tree": {"budget": None}}
    arguments = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    config = EngineArgs(TARGET, speculative_config=about, **arguments).create_engine_config()
    assert "16 requests have no room for 12 nodes" in getattr(config.speculative_config, MARK).varying


def test_a_crowd_without_trees() -> None:
    """On Model Runner V2 a batch above `most` requests drafts nothing: what a request draws depends on the others."""
    given: dict[str, Any] = {"method": "static_tree", "model": DRAFT, "num_speculative_tokens": 12}
    options, _ = TreeOptions.parse({**given, "tree": {"budget": None}})
    pair, sizes = resolve(options), {"requests": 300, "room": 16384}
    assert "more than 256 requests" in str(varying(pair, options, **sizes, most=256))
    assert varying(pair, options, **sizes) is None
