"""Every kind of draft in the engine: greedy outputs stay those of vLLM without speculation, and trees are verified."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import save_file
from vllm import SamplingParams

from tests import suffix_trees
from tests.engine import heads
from tests.engine.engines import (
    DRAFT,
    PAIR,
    PROMPTS,
    V2,
    Engines,
    TreeSpy,
    assert_identical,
    generate,
    keep_costs,
    metric,
    runner_of,
    set_costs,
)
from tests.engine.heads import HEADS
from vllm_adaptive_tree.budget import Planner
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.step import step

BATCH = ["\n".join(PROMPTS[:6]), *PROMPTS[6:13]]
NODES = 6
CHUNKED = {"max_num_batched_tokens": 64}  # less than the first prompt
TRAINED = PAIR / "head"
RANDOM = "eagle", "eagle3", "eagle3.1", "eagle3 reduced", "eagle3 last state"
"""Heads of random weights, of `HEADS`: hardly a node of theirs is accepted."""


class Case(NamedTuple):
    draft: str  # of `models`, or a name
    method: str
    rule: str = "auto"
    tree: dict[str, Any] = {}  # noqa: RUF012

    @property
    def name(self) -> str:
        return "-".join((self.draft, self.method, self.rule, *self.tree.get("lookup", "").split()))


CASES = [
    Case("eagle3", "opt_tree"),
    Case("eagle3", "dyspec"),
    Case("eagle3", "mcsd", tree={"shape": [2, 1, 1]}),
    Case("eagle3 reduced", "dyspec", "rrsw", {"threshold": 0.001}),
    Case("eagle3.1", "opt_tree"),
    Case("eagle", "opt_tree"),
    Case("eagle", "dyspec", "rrsw"),
    Case("ngram", "opt_tree"),
    Case("ngram", "adaptive_tree"),
    Case("suffix", "opt_tree"),
    Case("eagle3", "opt_tree", tree={"lookup": "ngram"}),
    Case("model", "opt_tree", tree={"lookup": "ngram"}),
    Case("model", "dyspec", "target_only", {"lookup": "suffix"}),
    Case("ngram", "dyspec", "rrsw"),
]
COVERED = [  # the methods grow trees of this head as the others do
    Case("eagle3", "eagle2", tree={"top_k": 3}),
    Case("eagle3", "c2t"),
    Case("eagle3", "static_tree", tree={"shape": [2, 1, 1]}),
    Case("eagle3", "sequoia"),
    Case("eagle3 last state", "opt_tree"),
]


def greedy() -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=14 + 3 * i, ignore_eos=True, logprobs=2) for i in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        **{name: HEADS[name](folder / str(number)) for number, name in enumerate(RANDOM)},
        "trained": str(TRAINED),
        "model": DRAFT,
        "ngram": "ngram",
        "suffix": "suffix",
    }


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(**CHUNKED), BATCH, greedy())


def config(models: dict[str, str], case: Case, nodes: int = NODES, **tree: Any) -> dict[str, Any]:
    kind = "eagle3" if case.draft in ("trained", *RANDOM[1:]) else case.draft
    return {
        "method": case.method,
        "model": models[case.draft],
        "num_speculative_tokens": nodes,
        "rejection_sample_method": case.rule,
        "tree": {"draft": kind, "budget": None, **case.tree, **tree},
    }


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in COVERED)],
    ids=lambda case: case.name,
)
def test_greedy(
    engines: Engines, models: dict[str, str], plain: list[Any], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks; the second time in cached blocks."""
    if "suffix" in (case.draft, case.tree.get("lookup")):
        suffix_trees.require()
    llm = engines.start(config(models, case), **CHUNKED)
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain, generate(llm, BATCH, greedy()))
    assert_identical(plain, generate(llm, BATCH, greedy()))
    assert metric(llm, "prefix_cache_hits") > 0
    assert sum(map(len, spy.trees)) > 50
    assert case.draft in RANDOM or metric(llm, "spec_decode_num_accepted_tokens") > 20


@pytest.mark.parametrize("budget", [12, "always", "never"])
@pytest.mark.parametrize("draft", ["eagle3", "ngram"])
def test_budget(
    engines: Engines,
    models: dict[str, str],
    plain: list[Any],
    draft: str,
    budget: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (draft, budget) == ("ngram", "never") and not V2:
        pytest.skip("the budget of V1 follows live steps, in which look-ups pay even so")
    slope = {"never": 1.0}.get(str(budget), 1e-9)
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 999 * slope]})
    fixed = budget if isinstance(budget, int) else "auto"
    llm = engines.start(config(models, Case(draft, "opt_tree"), budget=fixed), **CHUNKED)
    keep_costs(llm)
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain, generate(llm, BATCH, greedy()))
    sizes = [sum(map(len, batch)) for batch in spy.batches]
    assert not any(sizes) if budget == "never" else any(sizes)
    assert budget != 12 or max(sizes) <= 12


RESTING = [
    *(Case(draft, "opt_tree", tree={"lookup": "ngram"}) for draft in ("model", "eagle3")),
    Case("ngram", "opt_tree"),
]


REPEATING = [f"def {name}(self):\n    return self._{name}\n\n" * 5 for name in ("rows", "columns", "key")]
FORTY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def repeating(engines: Engines) -> list[Any]:
    """How the texts go on without speculation."""
    return generate(engines.start(**CHUNKED), REPEATING, FORTY)


@pytest.mark.parametrize("case", RESTING, ids=lambda case: case.name)
def test_look_ups_go_on_while_the_draft_rests(
    engines: Engines, models: dict[str, str], repeating: list[Any], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level takes a minute, and rows are free."""
    minute = {"rows": [1, 1000], "seconds": [60.0, 60.0]}
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]}, draft=minute)
    llm = engines.start(config(models, case, budget="auto"), **CHUNKED)
    runner = runner_of(llm)
    monkeypatch.setattr(runner.speculator if V2 else runner.drafter, "grow", None)
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(repeating, generate(llm, REPEATING, FORTY))
    assert sum(map(len, spy.trees)) > 50
    assert metric(llm, "spec_decode_num_accepted_tokens") > len(REPEATING) * 40 / 2
    assert all(not seen for seen in runner.budget.budget.recent), "what a rest brings says nothing of drafts"


@pytest.mark.skipif(V2, reason="the host does not wait for costs there")
def test_no_look_up_where_it_cannot_pay(
    engines: Engines, models: dict[str, str], repeating: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row costs what a token does; the texts are the same."""
    level = {"rows": [1, 1000], "seconds": [60.0, 60.0]}
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [1.0, 1000.0]}, draft=level)
    monkeypatch.setattr(Planner, "observe_step", lambda *_, **__: None)
    llm = engines.start(config(models, Case("model", "adaptive_tree"), budget="auto"), **CHUNKED)
    monkeypatch.setattr(runner_of(llm).offers, "continuations", None)
    assert_identical(repeating, generate(llm, REPEATING, FORTY))
    assert not metric(llm, "spec_decode_num_draft_tokens")


@pytest.mark.skipif(V2, reason="there requests with drawn children get no look-ups")
@pytest.mark.parametrize("rests", [True, False])
def test_look_ups_among_drawn_children(
    engines: Engines, models: dict[str, str], repeating: list[Any], rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sampled requests with one possible token: they say what greedy ones say. The draft may rest meanwhile."""
    seconds = 60.0 if rests else 1e-3
    level = {"rows": [1, 1000], "seconds": [seconds, seconds]}
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]}, draft=level)
    llm = engines.start(config(models, Case("model", "adaptive_tree"), budget="auto"), **CHUNKED)
    if rests:
        monkeypatch.setattr(runner_of(llm).drafter, "grow", None)
    chosen, accept = set[bool](), step.accept

    def spied(pair: Any, target: Any, verification: Any, requests: Any) -> Any:
        if verification.chosen is not None:
            chosen.update(verification.chosen[verification.tree.valid].tolist())
        return accept(pair, target, verification, requests)

    monkeypatch.setattr(step, "accept", spied)
    sampled = SamplingParams(temperature=1, top_k=1, max_tokens=40, ignore_eos=True, logprobs=2)
    assert_identical(repeating, generate(llm, REPEATING, sampled))
    assert chosen == ({True} if rests else {True, False})
    assert metric(llm, "spec_decode_num_accepted_tokens") > len(REPEATING) * 40 / 2


@pytest.mark.skipif(not TRAINED.is_dir(), reason="no trained head is bundled")
def test_a_chain_of_a_head_is_that_of_vllm(engines: Engines, models: dict[str, str]) -> None:
    """And a tree of the same depth has more accepted."""
    case = Case("trained", "static_tree", tree={"shape": [1, 1, 1, 1], "children": "top_k"})
    asked = [
        {"method": "eagle3", "model": str(TRAINED), "num_speculative_tokens": 4},
        config(models, case, nodes=4),
        config(models, Case("trained", "opt_tree", tree={"max_depth": 4, "threshold": 0}), nodes=12),
    ]
    found = []
    for one in asked:
        llm = engines.start(one)
        generate(llm, BATCH, greedy())
        found.append([metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted")])
    vllms, chain, wide = found
    fewer = [theirs - ours for theirs, ours in zip(vllms, chain, strict=True)]
    assert 0 <= fewer[0] <= (0 if V2 else 8 * len(BATCH)), "V1 drafts nothing for a request that is about to end"
    assert 0 <= fewer[1] <= 2 * len(BATCH), "vLLM counts accepted tokens that max_tokens cuts off"
    assert wide[1] > chain[1] > 20


@pytest.fixture(scope="module")
def with_mtp(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A target with a module of its own, and its outputs without speculation."""
    target = heads.mtp(tmp_path_factory.mktemp("mtp"))
    return target, generate(engines.start(model=target), BATCH, greedy())


@pytest.mark.parametrize(("method", "rule"), [("opt_tree", "auto"), ("dyspec", "rrsw")])
def test_mtp(
    engines: Engines, with_mtp: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, method: str, rule: str
) -> None:
    """The target's own layer, in its checkpoint."""
    target, plain = with_mtp
    tree = {"draft": "mtp", "budget": None, "threshold": 0}
    config = {"method": method, "model": target, "num_speculative_tokens": NODES, "tree": tree}
    config["rejection_sample_method"] = rule
    llm = engines.start(config, model=target, **CHUNKED)
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain, generate(llm, BATCH, greedy()))
    assert sum(map(len, spy.trees)) > 50


def test_a_text_has_no_hidden_states(engines: Engines, models: dict[str, str], tmp_path: Path) -> None:
    save_file(Gate(heads.HIDDEN, 4).state_dict(), tmp_path / "gate.safetensors")
    options = {"stop": "type1", "gate": str(tmp_path / "gate.safetensors"), "shape": [2, 1]}
    with pytest.raises(ValueError, match="reads the draft's hidden states, and"):
        engines.start(config(models, Case("ngram", "mcsd", tree=options)))
