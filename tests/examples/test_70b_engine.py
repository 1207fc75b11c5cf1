"""An engine of the 70B pair's structure, cut to two layers and narrowed, with random weights.

Kept: 64 query and 8 K/V heads of 128 for the target, 32 and 8 of 64 with a tied head for the draft, the vocabulary of
128,256, Llama 3's rope scaling. Narrowed, for the time that a CPU takes: hidden sizes and MLPs, to a sixteenth for the
target and to an eighth for the draft.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from model import Model, Shard
from vllm import SamplingParams
from vllm.model_executor.model_loader import dummy_loader

from tests.engine.engines import Engines, TreeSpy, assert_identical, generate, metric, runner_of

CONFIGS = Path(__file__).parents[2] / "examples" / "70b" / "configs"
CUT = {
    "target": {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1792},
    "draft": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024},
}
PROMPTS = [[128_000, *range(first, first + length)] for first, length in ((11, 3), (4242, 40), (99_000, 17))]
LENGTH = 12
RANGE = 0.5
"""Of the weights. vLLM's dummies lie within 0.001, where attention looks at nothing and layers add nothing."""
SHARP = 0.3
"""At this temperature of the draft some paths are likely, and trees have depth."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of both: configurations, and no weights."""
    folder = tmp_path_factory.mktemp("pair")
    for name, changes in CUT.items():
        (folder / name).mkdir()
        config = json.loads((CONFIGS / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, **changes}))
    return {name: str(folder / name) for name in CUT}


def decode(llm: Any, **sampling: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False, **sampling)
    return generate(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS], params)


@pytest.fixture(autouse=True, scope="module")
def wide_weights() -> Iterator[None]:
    original = dummy_loader.initialize_single_dummy_weight
    with pytest.MonkeyPatch.context() as patch:
        wide = partial(original, low=-RANGE, high=RANGE)
        patch.setattr(dummy_loader, "initialize_single_dummy_weight", wide)
        yield


@pytest.fixture(scope="module")
def arguments(pair: dict[str, str]) -> dict[str, Any]:
    return {"model": pair["target"], "load_format": "dummy", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def plain(engines: Engines, arguments: dict[str, Any]) -> list[Any]:
    outputs = decode(engines.start(**arguments), logprobs=2)
    assert any(len(set(output.token_ids)) > 1 for output in outputs)
    return outputs


@pytest.mark.parametrize("draft", CUT)
def test_the_cut_pair_decodes(
    engines: Engines,
    pair: dict[str, str],
    arguments: dict[str, Any],
    plain: list[Any],
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two models of random weights agree on nothing: trees are verified and refused. Random weights of one shape are
    the same ones, so the target is a draft that is always right. The text is vLLM's own both times."""
    spec = {"method": "opt_tree", "model": pair[draft], "num_speculative_tokens": 10}
    spec["tree"] = {"budget": None, "threshold": 0, "max_depth": 3, "draft_temperature": SHARP}
    llm = engines.start(spec, **arguments)
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain, decode(llm))
    nodes, steps = metric(llm, "adaptive_tree_nodes"), metric(llm, "spec_decode_num_drafts")
    accepted = metric(llm, "spec_decode_num_accepted_tokens")
    print(f"{draft}: {steps} steps, {nodes} nodes, {accepted} accepted")
    assert steps == len(spy.trees)
    assert nodes == sum(len(tree.tokens) for tree in spy.trees) > 0
    assert any(len(set(tree.parents)) < len(tree.parents) for tree in spy.trees), "siblings"
    assert any(parent >= 0 for tree in spy.trees for parent in tree.parents), "a second level"
    if draft == "draft":
        assert steps + accepted >= (LENGTH - 2) * len(PROMPTS)  # neither the first token nor the last needs a tree
    else:
        assert accepted >= 2 * steps
    shards = [Shard(Model.read(pair[name]), 1) for name in ("target", draft)]
    cached = sum(spec.page_size_bytes // spec.block_size for spec in runner_of(llm).get_kv_cache_spec().values())
    assert cached == 2 * sum(shard.kv for shard in shards)  # float32
