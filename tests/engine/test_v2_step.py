"""A step on Model Runner V2: nothing waits for the device, and the rows that run are those that the host can afford."""

import os
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import (
    DRAFT,
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
    tree,
)
from tests.engine.figures import by_label, check_figures, counts
from tests.pure.test_no_host_sync import NoHostSync
from vllm_adaptive_tree.budget import Plan
from vllm_adaptive_tree.budget.acceptance_model import INFORMATION
from vllm_adaptive_tree.drafters.ngram import NGram
from vllm_adaptive_tree.engine.common import node_quota
from vllm_adaptive_tree.engine.v2 import drafting, history, kernel_dispatch, target
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE

pytestmark = pytest.mark.skipif(not V2, reason="MODEL_RUNNER=v2")

BATCH = PROMPTS[:4]


def parameters() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
    return [SamplingParams(max_tokens=20 + i, ignore_eos=True, logprobs=2, **kinds[i % 2]) for i in range(4)]


class Rows:
    """Sizes of every step after the prompts: requests, rows."""

    def __init__(self, llm: Any, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[tuple[int, int]] = []
        runner = runner_of(llm)
        original = runner.prepare_attn

        def prepare(batch: Any) -> Any:
            if not batch.has_prefill:
                self.steps.append((batch.num_reqs, batch.num_tokens))
                assert int(batch.query_start_loc[batch.num_reqs]) == batch.num_tokens
                assert int(batch.cu_num_logits[-1]) == len(batch.logits_indices) == batch.num_tokens
            return original(batch)

        monkeypatch.setattr(runner, "prepare_attn", prepare)


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(), BATCH, parameters())


@pytest.mark.parametrize("method", ["opt_tree", "static_tree"])
def test_a_fixed_budget(engines: Engines, plain: list[Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": method, "model": DRAFT, "num_speculative_tokens": 12, "tree": {"budget": 9}}
    llm = engines.start(config)
    rows, spy = Rows(llm, monkeypatch), TreeSpy(llm, monkeypatch)
    assert_identical(plain, generate(llm, BATCH, parameters()))
    assert {tokens - requests for requests, tokens in rows.steps if requests > 1} == {9}
    assert max(sum(map(len, batch)) for batch in spy.batches) == 9
    sizes = {tuple(map(len, batch)) for batch in spy.batches if len(batch) == 4}
    assert (len(sizes) > 3) == (method == "opt_tree"), "the likeliest nodes of all requests"


@pytest.mark.parametrize(("slope", "fewest", "most"), [(1.0, 0, 0), (1e-9, 40, 48)])
def test_auto_follows_the_costs(
    engines: Engines,
    plain: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    slope: float,
    fewest: int,
    most: int,
) -> None:
    """Rows that cost a second each are not worth a node, and such a batch runs one row a request; rows that cost
    nothing are all taken."""
    draft = {"rows": [1, 12], "seconds": [1e-9, 1e-9]}
    verify = {"rows": [1, 1000], "seconds": [0.5, 0.5 + 999 * slope]}
    set_costs(monkeypatch, verify=verify, draft=draft)
    llm = engines.start(tree(12, budget="auto"))
    keep_costs(llm)
    rows = Rows(llm, monkeypatch)
    assert_identical(plain, generate(llm, BATCH, parameters()))
    later = [tokens - requests for requests, tokens in rows.steps if requests == 4][4:]
    assert later
    assert fewest <= max(later) <= most
    assert sum(rows == max(later) for rows in later) >= len(later) / 2 - 5, "5 steps show what one without drafts takes"


def test_large_trees_stand_depth_first(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.engine.v2 import verification

    monkeypatch.setattr(verification, "IN_GENERATION_ORDER", 8)
    llm = engines.start(tree(9))
    orders, depth_first = [], verification.depth_first

    def spied(parent: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        orders.append(depth_first(parent, valid))
        return orders[-1]

    spy = TreeSpy(llm, monkeypatch)
    monkeypatch.setattr(verification, "depth_first", spied)
    assert_identical(plain, generate(llm, BATCH, parameters()))
    assert sum(not torch.equal(one, torch.arange(9).expand_as(one)) for one in orders) > 5
    for one in spy.trees:
        parent = torch.tensor([one.parents])
        assert torch.equal(depth_first(parent)[0], torch.arange(len(one)))


def test_a_shape_with_fewer_nodes_than_asked_for(engines: Engines, plain: list[Any]) -> None:
    tree = {"shape": [2, 1, 1], "children": "top_k", "budget": None}
    llm = engines.start({"method": "static_tree", "model": DRAFT, "num_speculative_tokens": 9, "tree": tree})
    assert_identical(plain, generate(llm, BATCH, parameters()))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 10


def test_levels_fit_a_batch(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests, whose whole levels would have more rows than any forward may."""
    room, requests = 64, 9
    parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    batch = [PROMPTS[index % 4][:8] for index in range(requests)]
    expected = generate(engines.start(), batch, parameters)
    llm = engines.start(tree(12), max_num_batched_tokens=room, max_num_seqs=requests)
    rows: list[int] = []
    speculator = runner_of(llm).speculator
    original = speculator._run_model

    def run(tokens: torch.Tensor, *args: Any) -> Any:
        rows.append(len(tokens))
        return original(tokens, *args)

    monkeypatch.setattr(speculator, "_run_model", run)
    assert_identical(expected, generate(llm, batch, parameters))
    assert requests * (room // requests) in rows
    assert max(rows) <= room + requests, "what vLLM's first forward of a draft may have"


def test_auto_measures(engines: Engines, plain: list[Any]) -> None:
    llm = engines.start(tree(12, budget="auto"))
    assert_identical(plain, generate(llm, BATCH, parameters()))
    budget = runner_of(llm).budget
    assert budget.budget.costs.verify.cost(8) > 0
    assert all(one.observed > 0 for one in budget.budget.calibrations)
    assert np.isfinite(budget.value).all()
    names = ("adaptive_tree_expected_tokens", "adaptive_tree_observed_tokens")
    expected, observed = (metric(llm, name) for name in names)
    cut = 12 * len(BATCH)  # at most: the budget also sees nodes past max_tokens, which are not delivered
    assert 0 < observed <= metric(llm, "spec_decode_num_accepted_tokens") + cut
    assert 0.2 < expected / observed < 5, "of a few tokens"
    assert budget.temperature.information > INFORMATION
    assert budget.temperature.temperature != GREEDY_DRAFT_TEMPERATURE


def test_a_draft_that_rests_reads_nothing_and_catches_up(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole requests and parts of others pass without it, also those whose blocks a later request shares."""
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]})
    config = tree(4, budget="auto", max_depth=2, draft_temperature=1)
    llm = engines.start(config, max_num_batched_tokens=40)
    runner, steps = runner_of(llm), 0
    cycle, resting = 1, 0  # of so many steps, the first so many
    speculator, budget = runner.speculator, runner.budget.budget
    forwards: list[int] = []
    seen: list[tuple[list[int], int, float]] = []
    forward, store = speculator._run_model, speculator.drafts.store

    def begin(greedy: list[bool]) -> Plan:
        nonlocal steps
        steps += 1
        budget.plan = Plan(2 if steps % cycle >= resting else 0, 0.0)
        return budget.plan

    def counted(tokens: torch.Tensor, *args: Any) -> Any:
        forwards.append(len(tokens))
        return forward(tokens, *args)

    def stored(request: torch.Tensor, root: torch.Tensor, proposal: Any, *args: Any) -> None:
        for place, (index, at) in enumerate(zip(request.tolist(), root.tolist(), strict=True)):
            text = runner.req_states.all_token_ids.gpu[index, : at + 1].tolist()
            token, weight = proposal.tree.tokens[place, 0], proposal.tree.log_weight[place, 0]
            if token >= 0 and at >= runner.req_states.prefill_len.np[index]:
                seen.append((text, int(token), float(weight)))
        store(request, root, proposal, *args)

    monkeypatch.setattr(budget, "begin", begin)
    monkeypatch.setattr(speculator, "_run_model", counted)
    monkeypatch.setattr(speculator.drafts, "store", stored)
    prompts = ["\n".join(PROMPTS[:4]), PROMPTS[9]]  # more than one chunk, and several blocks
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    expected = generate(llm, prompts, greedy)
    assert forwards
    llm.reset_prefix_cache()
    resting = 1
    del forwards[:], seen[:]
    assert_identical(expected, generate(llm, prompts, greedy))
    assert not forwards, "a draft that rests runs no forward, for prompts neither"
    resting = 0
    assert_identical(expected, generate(llm, prompts, greedy))  # in blocks that the draft has never read
    assert max(forwards) <= 40 + 2, "what it missed is read in chunks"
    after = len(seen)
    cycle, resting = 8, 4
    assert_identical(expected, generate(llm, prompts, greedy))
    assert min(after, len(seen) - after) > 5
    draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    for context, token, weight in seen:
        with torch.no_grad():
            law = draft(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        assert float(law[token]) == pytest.approx(weight, abs=2e-3)


def test_no_trees_grow_where_none_is_verified(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amid prompts, and after a request's last token, where vLLM knows it; the draft reads on."""
    llm = engines.start(tree(6), max_num_batched_tokens=40)
    runner, grown, amid = runner_of(llm), list[bool](), list[bool]()
    grow, propose = runner.speculator.grown_trees, runner.speculator.propose

    def count(*args: Any) -> Any:
        grown[-1] = True
        return grow(*args)

    def proposed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        grown.append(False)
        ends = kwargs.get("num_speculative_tokens") == 0
        amid.append(ends or all(batch.num_computed_tokens_np + batch.num_scheduled_tokens < batch.prefill_len_np))
        return propose(batch, *args, **kwargs)

    monkeypatch.setattr(runner.speculator, "grown_trees", count)
    monkeypatch.setattr(runner.speculator, "propose", proposed)
    prompt, greedy = "\n".join(PROMPTS[:8]), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    chunked = generate(llm, [prompt], greedy)
    assert sum(amid) > 2
    assert grown == [not one for one in amid]
    assert_identical(generate(engines.start(), [prompt], greedy), chunked)


@pytest.mark.parametrize("draft", ["model", "eagle3"])
def test_a_crowd_decodes_without_trees(
    engines: Engines, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are there for two trees. The draft rests while there are more requests, and drafts for the last two."""
    for module in (drafting, node_quota):
        monkeypatch.setattr(module, "MOST_TREES", 2)
    model = DRAFT if draft == "model" else heads.eagle3(tmp_path / "draft")
    llm = engines.start({**tree(6), "model": model}, max_num_seqs=4)
    runner, grown = runner_of(llm), list[int]()
    speculator = runner.speculator
    assert len(speculator.inputs.request) == len(speculator.drafts.read) == 2
    grow = speculator.grown_trees

    def count(requests: int, levels: int) -> Any:
        grown.append(requests)
        return grow(requests, levels)

    monkeypatch.setattr(speculator, "grown_trees", count)
    ends = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2) for count in (6, 8, 20, 22)]
    outputs = generate(llm, BATCH, ends)
    assert max(grown) == 2
    assert metric(llm, "spec_decode_num_accepted_tokens") > (4 if draft == "model" else -1)
    assert_identical(generate(engines.start(), BATCH, ends), outputs)


Trees = dict[tuple[int, ...], tuple[list[int], list[float]]]
"""Text -> tokens and log weights of the tree that was drafted after it."""


def compared(found: Trees, expected: Trees) -> int:
    """Compare the trees of the same texts, and return how many there are."""
    same = found.keys() & expected.keys()
    for text in same:
        assert found[text][0] == expected[text][0]
        assert found[text][1] == pytest.approx(expected[text][1], abs=1e-4)
    return len(same)


@pytest.mark.parametrize(
    ("draft", "lookup"), [("eagle3", None), ("eagle3", "ngram"), ("dflash2", "ngram"), ("dflash2", None)]
)
def test_a_head_that_rests_reads_later(
    engines: Engines, tmp_path: Path, draft: str, lookup: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trees are those of a head that never rests, also after prompts in chunks and in blocks of earlier requests:
    what the target has left of a step waits, and what a request has left when it ends is read. A look-up accepts nodes
    meanwhile."""
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]})
    config = tree(4, budget="auto", draft=draft, max_depth=2, draft_temperature=1, threshold=0, lookup=lookup)
    model = getattr(heads, draft)(tmp_path / "head")
    llm = engines.start({**config, "model": model}, max_num_batched_tokens=256, max_num_seqs=4)
    runner, steps, resting = runner_of(llm), 0, 0
    speculator, budget = runner.speculator, runner.budget.budget
    found: Trees = {}
    reads: list[list[int]] = []  # rows of each forward, of each step
    store = speculator.drafts.store

    def begin(greedy: list[bool]) -> Plan:
        nonlocal steps
        steps += 1
        reads.append([])
        budget.plan = Plan(2 if steps % 12 >= resting else 0, 0.0)
        return budget.plan

    def stored(request: torch.Tensor, root: torch.Tensor, proposal: Any, *args: Any) -> None:
        for place, (index, at) in enumerate(zip(request.tolist(), root.tolist(), strict=True)):
            if at >= runner.req_states.prefill_len.np[index] and budget.plan.levels:
                text = tuple(runner.req_states.all_token_ids.gpu[index, : at + 1].tolist())
                found[text] = proposal.tree.tokens[place].tolist(), proposal.tree.log_weight[place].tolist()
        store(request, root, proposal, *args)

    def watched(owner: Any, name: str, rows_of: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def read(*args: Any, **options: Any) -> Any:
            reads[-1].append(rows_of(*args))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, read)

    monkeypatch.setattr(budget, "begin", begin)
    monkeypatch.setattr(speculator.drafts, "store", stored)
    if draft == "eagle3":
        watched(speculator, "forward", lambda tokens, *_: len(tokens))
        watched(speculator, "_run_model", lambda rows, *_: rows)
    else:
        watched(speculator.block, "_precompute_context_kv", lambda start, end, *_: end - start)
    prompts = ["\n".join(PROMPTS + PROMPTS[:4]), "def rows(self):\n    return self._rows\n\n" * 4]
    lengths = [len(llm.get_tokenizer().encode(prompt)) for prompt in prompts]
    counts = [32 + (2 - length) % 32 for length in lengths]  # the last block but one has just been filled
    ends = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    outputs = llm.generate(prompts, ends, use_tqdm=False)
    expected = [list(one.outputs[0].token_ids) for one in outputs]
    texts = [one.prompt_token_ids + list(one.outputs[0].token_ids) for one in outputs]
    follow = [{"prompt_token_ids": text} for text in texts]
    few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.reset_prefix_cache()
    generate(llm, follow, few)
    trees = dict(found)
    llm.reset_prefix_cache()

    for resting in (12, 8):
        found.clear()
        reads.clear()
        accepted = metric(llm, "spec_decode_num_accepted_tokens")
        assert [list(one.token_ids) for one in generate(llm, prompts, ends)] == expected
        assert sum(not rows for rows in reads) > len(reads) / 3, "a head that rests runs no forward"
        if resting == 12:
            assert (metric(llm, "spec_decode_num_accepted_tokens") - accepted > 10) == (lookup is not None)
        rests, resting = resting, 0
        generate(llm, PROMPTS[10:14], SamplingParams(temperature=0, max_tokens=1))  # in the places of those that left
        generate(llm, follow, few)
        assert compared(found, trees) > (4 if rests == 12 else 6)
    assert metric(llm, "prefix_cache_hits") > 0


@pytest.mark.parametrize("levels", [0, 2])
def test_look_ups_among_drawn_children(
    engines: Engines, plain: list[Any], levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of both kinds takes look-ups while the draft rests and beside its drafts; a node that a drawn request
    verifies is chosen if the text has it, and drawn if not."""
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]})
    llm = engines.start({**tree(6, budget="auto", max_depth=2, lookup="ngram"), "method": "adaptive_tree"})
    runner = runner_of(llm)
    budget, step = runner.budget.budget, runner.step
    seen: Counter[str] = Counter()
    accept = step.accept

    def begin(greedy: list[bool]) -> Plan:
        budget.plan = Plan(levels, 0.0)
        return budget.plan

    def accepted(target: Any, requests: Any, **options: Any) -> Any:
        found, verification = accept(target, requests, **options), step.verification
        chosen = verification.chosen & verification.tree.valid
        walks = torch.ones(len(chosen), dtype=torch.bool) if requests.from_target is None else requests.from_target
        seen["chosen"] += int(chosen[~walks].sum())
        seen["drawn"] += int((verification.tree.valid & ~chosen)[~walks].sum())
        nodes = found.nodes[~walks]
        seen["accepted"] += int((chosen[~walks].gather(1, nodes.clamp(min=0)) & (nodes >= 0)).sum())
        return found

    monkeypatch.setattr(budget, "begin", begin)
    monkeypatch.setattr(step, "accept", accepted)
    repeated = "def rows(self):\n    return self._rows\n\n" * 4
    sampled = SamplingParams(temperature=0.6, max_tokens=40, ignore_eos=True)
    found = generate(llm, [*BATCH, repeated, repeated], [*parameters(), sampled, sampled])
    assert_identical(plain, found[: len(BATCH)])
    assert seen["chosen"] > 10
    assert seen["accepted"] > 4
    assert (seen["drawn"] > 0) == (levels > 0)


@pytest.mark.parametrize("draft", ["model", "eagle3"])
def test_a_few_of_a_resting_batch_draft(
    engines: Engines, tmp_path: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four for three steps, then all: the trees are those of a draft that never rests."""
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 1e-6]})
    model = DRAFT if draft == "model" else heads.eagle3(tmp_path)
    config = tree(4, budget="auto", draft=draft, max_depth=2, draft_temperature=1, threshold=0)
    llm = engines.start({**config, "model": model}, max_num_batched_tokens=128, max_num_seqs=4)
    runner, steps, rests = runner_of(llm), 0, False
    speculator, budget = runner.speculator, runner.budget.budget
    found: Trees = {}
    sizes: list[tuple[int, int]] = []  # few, and trees, of each step
    store = speculator.drafts.store

    def begin(greedy: list[bool]) -> Plan:
        nonlocal steps
        steps += 1
        few = rests and len(greedy) == 4 and steps % 8 in (4, 5, 6)
        budget.plan = Plan(2 if few or not rests or steps % 8 == 7 else 0, 0.0, few=2 if few else 0)
        return budget.plan

    def stored(request: torch.Tensor, root: torch.Tensor, proposal: Any, *args: Any) -> None:
        count = 0
        for place, (index, at) in enumerate(zip(request.tolist(), root.tolist(), strict=True)):
            drafted = proposal.tree.tokens[place].tolist()
            if drafted[0] >= 0 and at >= runner.req_states.prefill_len.np[index]:
                text = tuple(runner.req_states.all_token_ids.gpu[index, : at + 1].tolist())
                found[text] = drafted, proposal.tree.log_weight[place].tolist()
                count += 1
        sizes.append((budget.plan.few, count))
        store(request, root, proposal, *args)

    monkeypatch.setattr(budget, "begin", begin)
    monkeypatch.setattr(speculator.drafts, "store", stored)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    expected = [list(one.token_ids) for one in generate(llm, BATCH, greedy)]
    trees = dict(found)
    llm.reset_prefix_cache()
    found.clear()
    sizes.clear()
    rests = True
    assert [list(one.token_ids) for one in generate(llm, BATCH, greedy)] == expected
    assert {count for few, count in sizes if few} == {2}
    assert max(count for few, count in sizes if not few) == 4
    assert compared(found, trees) > 10


def test_metrics(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the nodes that were verified, not of the places that the scheduler reserves; some requests get no node."""
    llm = engines.start(tree(12, budget=3), per_request_spec_decode_metrics="detailed")
    spy = TreeSpy(llm, monkeypatch)
    outputs = generate(llm, BATCH, parameters())
    assert_identical(plain, outputs)
    verified = Counter(str(depth) for one in spy.trees for depth in one.depths)
    assert counts(llm, "adaptive_tree_nodes", "depth") == verified
    fallbacks = check_figures(llm, outputs, nodes=verified.total())
    assert fallbacks["budget"] > 10
    assert metric(llm, "adaptive_tree_drafted_nodes") > 2 * verified.total()
    assert metric(llm, "adaptive_tree_budget_nodes") == 3
    seconds = by_label(llm, "adaptive_tree_phase_seconds", "phase")
    assert set(seconds) == {"verify", "accept", "draft"}
    assert all(one.sum > 0 for one in seconds.values())


@pytest.mark.parametrize(
    ("method", "draft"),
    [
        *[(method, "model") for method in ("adaptive_tree", "opt_tree", "dyspec", "mcsd")],
        *[("opt_tree", draft) for draft in ("eagle3", "ngram")],
    ],
)
def test_nothing_waits_for_the_device(
    engines: Engines, plain: list[Any], tmp_path: Path, method: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our part of a step: trees to positions, acceptance, commit, drafting; not what vLLM's CPU attention does."""
    from vllm_adaptive_tree.engine.v2.verification import Verification
    from vllm_adaptive_tree.step import TreeStep

    calls: dict[str, int] = {}

    def guarded(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            with NoHostSync():
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    models = {"model": DRAFT, "eagle3": heads.eagle3(tmp_path), "ngram": "ngram"}
    path, growth = (Verification, "write_path"), (drafting, "draft_tree")
    own: dict[str, list[tuple[Any, str]]] = {
        "model": [growth, path],
        "eagle3": [growth, path],
        "ngram": [(NGram, "continuations")],
    }
    options = {"budget": 12, "draft": draft}
    llm = engines.start({"method": method, "model": models[draft], "num_speculative_tokens": 9, "tree": options})
    guards = own[draft]
    for owner, name in (
        (Verification, "write_rows"),
        (Verification, "dense"),
        (Verification, "commit"),
        (TreeStep, "accept"),
        *guards,
    ):
        guarded(owner, name)
    assert_identical(plain, generate(llm, BATCH, parameters()))
    assert len(calls) == 4 + len(guards)
    assert min(calls.values()) > 3


KERNELS = [
    (import_module(f"vllm_adaptive_tree.kernels.{module}"), name)
    for module, name in (
        ("sampling", "_sample"),
        ("rejection_walk", "_reject"),
        ("traversal", "_traverse"),
        ("walk", "_walk"),
        ("paths", "_windows"),
    )
]


class Launches:
    def __init__(self, kernel: Any):
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return self.kernel[grid]


@pytest.mark.parametrize(
    ("method", "rule", "options"),
    [
        ("dyspec", "traversal", {"threshold": 0.1, "max_children": 3, "max_depth": 3}),
        ("dyspec", "rrsw", {"threshold": 0.1, "max_children": 3, "max_depth": 3}),
        ("static_tree", "rrs", {"shape": [2, 1], "children": "iid"}),
    ],
)
def test_kernels_of_draws_and_rules(
    engines: Engines, method: str, rule: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the same tokens as by PyTorch's operations."""
    config = {"method": method, "model": DRAFT, "num_speculative_tokens": 6, "rejection_sample_method": rule}
    llm = engines.start({**config, "tree": {"budget": None, **options}})
    sampled = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.6 + 0.2 * i, seed=i) for i in range(3)]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    expected = generate(llm, BATCH, [*sampled, greedy])
    kernels = {name: Launches(getattr(module, name)) for module, name in KERNELS}
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, kernels[name])
    for module in (kernel_dispatch, target):
        monkeypatch.setattr(module, "compiles", lambda device: True)
    found = generate(llm, BATCH, [*sampled, greedy])
    assert [list(one.token_ids) for one in found] == [list(one.token_ids) for one in expected]
    assert kernels["_sample"].count > 20
    assert kernels["_walk"].count > 2, "while the greedy one runs"
    assert (kernels["_traverse"].count > 3) == (rule == "traversal")
    assert (kernels["_reject"].count > 3) == (rule != "traversal")


HISTORY: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.9, "frequency_penalty": -0.4},
    "all": {"repetition_penalty": 1.3, "bad_words": ["the", " self", "self.self"], "thinking_token_budget": 3},
}


def test_history_of_every_node(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, bad words and thinking budgets heed the path to each node: of all at once, in parts, and, where that
    takes too much memory, of those of a level of the walk."""
    reasoning = {"reasoning_start_str": " the", "reasoning_end_str": ".\n"}
    laws: list[dict[str, Any]] = [{"temperature": 0.8, "seed": 3}, {"temperature": 0}]
    batches = [
        [
            SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **laws[i % 2], **(kind if i < 3 else {}))
            for i in range(4)
        ]
        for kind in ({}, *HISTORY.values())
    ]
    llm = engines.start(reasoning_config=reasoning)
    without, *plain = (generate(llm, BATCH, params) for params in batches)
    for kind, found in zip(HISTORY, plain, strict=True):
        assert any(one.token_ids != other.token_ids for one, other in zip(found, without, strict=True)), kind
    options = {"threshold": 0.1, "max_children": 3, "max_depth": 3, "budget": None}
    config = {"method": "dyspec", "model": DRAFT, "num_speculative_tokens": 6, "tree": options}
    llm = engines.start(config, reasoning_config=reasoning)
    spy = TreeSpy(llm, monkeypatch)
    lengths = Counter[int]()
    original = history.OnPaths.apply

    def apply(self: Any, logits: Any, context: Any) -> Any:
        lengths[len(logits)] += 1
        return original(self, logits, context)

    monkeypatch.setattr(history.OnPaths, "apply", apply)
    for limits in ({}, {"MOST_BYTES": 1}, {"most": 1}):
        for name, value in limits.items():
            if name == "most":
                monkeypatch.setattr(target, "get_max_chunk_logits", lambda vocabulary, value=value: value)
            else:
                monkeypatch.setattr(history, name, value)
        lengths.clear()
        for params, wanted in zip(batches[1:], plain, strict=True):
            assert_identical(wanted, generate(llm, BATCH, params))
        assert (max(lengths) > 16) == ("most" not in limits), "all nodes, or one of each request"
    assert max(map(len, spy.trees)) == 6


def test_asynchronous_scheduling_where_it_is_asked_for(engines: Engines) -> None:
    core = engines.start(tree(4)).llm_engine.engine_core.engine_core
    assert (type(core.scheduler).__name__ == "AsyncScheduler") == (os.environ["MODEL_RUNNER"] == "v2-async")
    assert (core.batch_queue is not None) == (os.environ["MODEL_RUNNER"] == "v2-async")


def test_beside_replicas_there_is_no_quota(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM drops the schedule of nodes there, once the engine's own process has its configuration."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    init = UniProcExecutor.__init__

    def dropped(self: Any, config: Any, *args: Any, **options: Any) -> None:
        config.speculative_config.num_speculative_tokens_per_batch_size = None
        init(self, config, *args, **options)

    monkeypatch.setattr(UniProcExecutor, "__init__", dropped)
    llm = engines.start(tree(6, budget="auto"))
    assert runner_of(llm).budget.quotas is None
    assert_identical(plain, generate(llm, BATCH, parameters()))
