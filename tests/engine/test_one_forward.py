"""Trees of heads that predict all depths in one forward: the same tokens, whatever they say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, assert_identical, generate, metric, runner_of
from tests.engine.heads import DEPTH, HEADS, VOCABULARY
from tests.engine.leaning import lean, second_best
from tests.engine.test_methods import METHODS, RULES, folder

__all__ = ["folder"]  # a fixture

BATCH, NODES = (PROMPTS[:3], 10) if V2 else (PROMPTS[:8], 20)  # the interpreter is slow
ONE_FORWARD = [name for name in HEADS if not name.startswith("eagle")]
CASES = [
    ("dflash", "opt_tree", "auto", {"threshold": 0}),
    ("dflash", "dyspec", "rrsw", {}),
    ("dflash2", "opt_tree", "auto", {"threshold": 0}),
    ("dflash2", "dyspec", "rrsw", {}),
    ("lilicorr", "opt_tree", "auto", {"threshold": 0}),
    ("dspark", "opt_tree", "auto", {"threshold": 0}),
    ("dspark", "dyspec", "rrsw", {}),
    ("peagle", "opt_tree", "auto", {"threshold": 0}),
    ("peagle", "dyspec", "rrsw", {}),
    *([("xpress", "opt_tree", "auto", {"threshold": 0}), ("xpress", "dyspec", "rrsw", {})] if heads.XPRESS else []),
]
MANY = ("dflash", "dspark")
"""Heads that are tried with every method and every rule."""
SLOW = [
    *((head, *METHODS[name][:1], "auto", METHODS[name][1]) for head in MANY for name in METHODS),
    *((head, method, rule, options) for head in MANY for rule, (method, options, _) in RULES.items()),
    *((head, "opt_tree", "auto", {"threshold": 0}) for head in ONE_FORWARD),
    *((head, "static_tree", "traversal", {"shape": [3, 2, 1, 1]}) for head in ONE_FORWARD),
    ("dflash", "static_tree", "auto", {"shape": [2, 1]}),  # fewer nodes than the block has tokens
    ("dflash", "opt_tree", "auto", {"budget": "auto"}),
    ("dspark", "opt_tree", "auto", {"lookup": "ngram"}),
]
SLOW = [case for case in SLOW if case[3].get("stop") != "type1"]


def parameter(case: tuple[str, str, str, dict[str, Any]]) -> Any:
    head, method, rule, options = case
    marks = [pytest.mark.slow] * (case not in CASES)
    marks += [heads.ON_V1] * head.startswith("peagle")
    name = f"{head}-{method}-{rule}" + f" {options}" * (case not in CASES)
    return pytest.param(case, marks=marks, id=name)


def parameters() -> list[SamplingParams]:
    """Greedy and seeded in turn; they end one after the other."""
    laws: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]
    return [
        SamplingParams(max_tokens=34 - 2 * i, ignore_eos=True, logprobs=2, **laws[i % 4 == 3])
        for i in range(len(BATCH))
    ]


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return engines.start().generate(BATCH, parameters(), use_tqdm=False)


def assert_each_layer_has_its_norm(runner: Any) -> None:
    """On the context's keys; the layers' weights differ."""
    backbone = runner.speculator.block.model.model if V2 else runner.drafter.model.model
    norms = [layer.self_attn.k_norm for layer in backbone.layers]
    keys = torch.randn(len(norms), 3, 2, len(norms[0].weight))
    assert not torch.equal(norms[0].weight, norms[1].weight)
    own = torch.stack([norm.forward_native(key) for norm, key in zip(norms, keys, strict=True)])
    torch.testing.assert_close(backbone._normalize_context_k(keys), own)


def identical(
    engines: Engines,
    plain: list[Any],
    folder: Path,
    case: tuple[str, str, str, dict[str, Any]],
    patch: pytest.MonkeyPatch,
) -> list[Any]:
    """The trees; the head agrees with what is known of the target, so that deep nodes are accepted."""
    head, method, rule, options = case
    options = {key: str(folder / value) if key in ("gate", "vector") else value for key, value in options.items()}
    spec = {"method": method, "model": HEADS[head](folder / head), "num_speculative_tokens": NODES}
    tree = {"budget": None, **options}
    llm = engines.start({**spec, "rejection_sample_method": rule, "tree": tree})
    if not head.startswith("peagle"):
        assert_each_layer_has_its_norm(runner_of(llm))
    known = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in plain]
    lean(runner_of(llm), second_best(known, VOCABULARY), patch.setattr)
    spy, kept = TreeSpy(llm, patch), parameters()
    same = [i for i, one in enumerate(kept) if one.temperature == 0 or rule in ("auto", "target_only")]
    ours = generate(llm, BATCH, kept)
    assert_identical([plain[i].outputs[0] for i in same], [ours[i] for i in same])
    if "lookup" not in options:  # continuations reach deeper
        assert max(max(one.depths, default=0) for one in spy.trees) <= DEPTH, "the checkpoint's block, not the nodes"
    if tree["budget"] is None:
        some = 0 if head.endswith(("reduced", "candidates")) else sum(one.max_tokens for one in kept) / 3
        assert metric(llm, "spec_decode_num_accepted_tokens") > some
    return spy.batches


@pytest.mark.slow
@pytest.mark.parametrize("head", ["dflash2", "lilicorr", "dspark"])
def test_compiled(engines: Engines, head: str, tmp_path: Path) -> None:
    """vLLM compiles for the first batch, of one request, and drops all guards; the batches here have eight."""
    plain = engines.start(enforce_eager=False).generate(BATCH, parameters(), use_tqdm=False)
    spec = {"method": "opt_tree", "model": HEADS[head](tmp_path / head), "num_speculative_tokens": NODES}
    llm = engines.start({**spec, "tree": {"budget": None, "threshold": 0}}, enforce_eager=False)
    ours = generate(llm, BATCH, parameters())
    assert_identical([one.outputs[0] for one in plain], ours)
    assert metric(llm, "spec_decode_num_draft_tokens") > 0


@pytest.mark.parametrize("case", [parameter(one) for one in [*CASES, *(one for one in SLOW if one not in CASES)]])
def test_greedy_and_seeded(
    engines: Engines,
    plain: list[Any],
    folder: Path,
    case: tuple[str, str, str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = identical(engines, plain, folder, case, monkeypatch)
    if case in CASES:
        assert any(len({tree.parents for tree in batch}) > 1 for batch in batches), "trees of one batch are too alike"
        assert any(DEPTH in tree.depths and len(tree.branches()) > 2 for batch in batches for tree in batch)
