"""One budget for the batch: the same tokens, fewer nodes, and drafts that are right again after a rest."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import (
    DRAFT,
    PROMPTS,
    V2,
    Engines,
    TreeSpy,
    assert_identical,
    generate,
    metric,
    runner_of,
    set_costs,
    tree,
)
from vllm_adaptive_tree.budget import Budget, Plan
from vllm_adaptive_tree.budget.acceptance_model import LOOKUP_PRIOR, PRIOR
from vllm_adaptive_tree.budget.calibration_loops import DEPTHS
from vllm_adaptive_tree.engine.v1 import host_draft, host_engine
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE

pytestmark = pytest.mark.skipif(V2, reason="of the V1 adapter; test_v2_step.py has the other's")

NODES, BATCH = 12, 8


def parameters(i: int) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 30 + 2 * i, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(temperature=0.8, seed=i, **common) if i % 3 == 2 else SamplingParams(temperature=0, **common)


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(), PROMPTS[:BATCH], [parameters(i) for i in range(BATCH)])


@pytest.mark.parametrize("method", ["opt_tree", "dyspec", "static_tree"])
def test_a_fixed_budget(engines: Engines, plain: list[Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": method, "model": DRAFT, "num_speculative_tokens": 20, "tree": {"budget": NODES}}
    llm = engines.start(config)
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain, generate(llm, PROMPTS[:BATCH], [parameters(i) for i in range(BATCH)]))
    sizes = [[len(one) for one in batch] for batch in spy.batches]
    assert max(map(sum, sizes)) == NODES
    assert max(max(size, default=0) for size in sizes) > NODES / BATCH + 1, "it is not one budget for all"
    sampled, greedy = runner_of(llm).budget.budget.calibrations
    assert min(sampled.observed, greedy.observed) > 0
    assert 0.5 < (sampled.predicted + greedy.predicted) / (sampled.observed + greedy.observed) < 2


def test_look_ups_are_learnt_apart_and_levels_by_their_rows(
    engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.start(tree(20, budget=NODES, lookup="ngram"))
    budget, levels = runner_of(llm).budget.budget, []
    monkeypatch.setattr(budget, "observe_level", lambda requests, rows, seconds: levels.append((requests, rows)))
    assert_identical(plain, generate(llm, PROMPTS[:BATCH], [parameters(i) for i in range(BATCH)]))
    _, greedy = budget.calibrations
    drafted, found = greedy.trials[1 : 1 + DEPTHS], greedy.trials[1 + DEPTHS :]
    assert (drafted > PRIOR).any()
    assert (found > LOOKUP_PRIOR).any()
    assert {requests for requests, _ in levels} <= set(range(1, 1 + BATCH))
    assert any(rows > 2 * requests for requests, rows in levels)


def test_auto_measures_and_follows_the_costs(
    engines: Engines, plain: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    auto = tree(20, budget="auto", cost_profile=str(file))
    llm = engines.start(auto)
    costs = json.loads(file.read_text())["costs"]
    curve = costs["verify"]
    assert curve["rows"][:6] == [1, 2, 3, 4, 5, 6]
    assert all(seconds > 0 for seconds in curve["seconds"])
    assert costs["draft"]["rows"] == [1, 2, 4, 20]
    assert costs["context"] >= 0
    assert_identical(plain, generate(llm, PROMPTS[:BATCH], [parameters(i) for i in range(BATCH)]))
    budget = runner_of(llm).budget
    assert budget.budget.overhead(drafted=True) != 0
    assert budget.greedy_temperature != GREEDY_DRAFT_TEMPERATURE, "fitted to what the target took"
    # rows that cost a second each are not worth a node; rows that cost nothing are all taken
    for slope, fewest, most in ((1.0, 0, 0.5), (1e-9, 19, 20)):
        set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.5, 0.5 + 999 * slope]})
        llm = engines.start(tree(20, budget="auto"))
        assert_identical(plain[:1], generate(llm, PROMPTS[:1], [parameters(0)]))
        drafted = metric(llm, "spec_decode_num_draft_tokens") / max(1, metric(llm, "spec_decode_num_drafts"))
        assert fewest <= drafted <= most
    told, steering = [], runner_of(llm).steering
    monkeypatch.setattr(steering, "price", lambda threshold, floor: told.append(floor))
    generate(llm, PROMPTS[:4], SamplingParams(temperature=0, max_tokens=30))
    assert max(told) > float("-inf"), "nobody told it what the batch verifies"


class Resting(Budget):
    """Rests, or lets a few draft, as it is told."""

    rests, few = False, 0

    def begin(self, greedy: Sequence[bool]) -> Plan:
        return self.plan._replace(levels=0 if self.rests else self.plan.levels, few=self.few)


def test_a_rested_draft_catches_up(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole requests and parts of others pass without it, also those whose blocks a later request shares."""
    llm = engines.start(tree(6, budget=1000, max_depth=3, draft_temperature=1), max_num_batched_tokens=40)
    runner = runner_of(llm)
    runner.budget.budget = budget = Resting(sampled=False, most=1000)
    forwards, seen, original = [], [], host_draft.draft_tree
    forward = runner.drafter._forward

    def counted(*args: Any) -> Any:
        forwards.append(len(args[0]))
        return forward(*args)

    def draft_tree(*args: Any, **kwargs: Any) -> Any:
        proposal, state = original(*args, **kwargs), args[3]
        batch = runner.input_batch
        texts = {int(n): batch.token_ids_cpu[row, :n].tolist() for row, n in enumerate(batch.num_tokens_no_spec)}
        for r, root in enumerate(state.root.tolist()):
            seen.append((texts[root + 1], proposal.tree.tokens[r, 0], proposal.tree.log_weight[r, 0]))
        return proposal

    monkeypatch.setattr(runner.drafter, "_forward", counted)
    monkeypatch.setattr(host_draft, "draft_tree", draft_tree)
    long = "\n".join(PROMPTS[:6])  # more than one chunk, and several blocks
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)

    expected = generate(llm, [long, PROMPTS[9]], greedy)
    assert forwards
    llm.reset_prefix_cache()
    budget.rests = True
    del forwards[:], seen[:]
    assert [one.token_ids for one in generate(llm, [long, PROMPTS[9]], greedy)] == [one.token_ids for one in expected]
    assert not forwards, "a draft that rests runs no forward, for prompts neither"
    budget.rests = False
    ours = generate(llm, [long, PROMPTS[9]], greedy)  # the blocks of the run before, which the draft has never read
    assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    assert max(forwards) <= 40 + 2, "what it missed is read in chunks"

    budget.few, trees = 2, len(seen)
    drafted = list[int]()
    monkeypatch.setattr(runner.budget, "steer", lambda _, trees: drafted.append(trees))
    batch = [long, PROMPTS[9], "\n".join(PROMPTS[:3])]  # so different that no two are ever as long as each other
    ours = generate(llm, batch, greedy)
    assert [one.token_ids for one in ours[:2]] == [one.token_ids for one in expected]
    assert max(drafted) == 2, "the third rests in turn"
    assert len(seen) - trees == sum(drafted)

    draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    assert len(seen) > 40
    for context, token, weight in seen[:: len(seen) // 20]:
        with torch.no_grad():
            law = draft(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        assert float(law[token]) == pytest.approx(float(weight), abs=2e-3)


def test_fewer_nodes_with_prompts(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are free up to 24 and dear behind; a prompt fills those, so only likely nodes are verified beside one."""
    set_costs(monkeypatch, verify={"rows": [1, 24, 1000], "seconds": [0.05, 0.05, 20.0]})
    llm = engines.start(tree(6, budget="auto", max_depth=3), max_num_seqs=3)
    runner, cuts = runner_of(llm), []
    for told in ("observe_step", "observe_level"):  # the costs stay as they are set
        monkeypatch.setattr(runner.budget.budget, told, lambda *_, **__: None)
    affordable = host_engine.affordable

    def spied(scheduled: Any, *args: Any, **given: Any) -> Any:
        fewer = affordable(scheduled, *args, **given)
        assert sum(fewer.num_scheduled_tokens.values()) == fewer.total_num_scheduled_tokens
        before, after = (sum(map(len, one.scheduled_spec_decode_tokens.values())) for one in (scheduled, fewer))
        prompts = scheduled.total_num_scheduled_tokens - len(scheduled.num_scheduled_tokens) - before
        cuts.append((prompts, before, after))
        return fewer

    monkeypatch.setattr(host_engine, "affordable", spied)
    json_like = StructuredOutputsParams(regex=r"[a-z ]{40,60}")
    structured = SamplingParams(temperature=0, max_tokens=40, structured_outputs=json_like)
    wanted = [structured, *[parameters(i) for i in range(1, BATCH)]]
    long = ["\n".join(PROMPTS[i : i + 3]) for i in range(2, 6)]
    texts = [PROMPTS[0], *long, *PROMPTS[5:8]]
    ours = generate(llm, texts, wanted)
    cut = [(before, after) for prompts, before, after in cuts if prompts > 0 and before]
    assert cut
    assert sum(after for _, after in cut) < sum(before for before, _ in cut)
    assert sum(after for _, after in cut) > 0
    assert all(before == after for prompts, before, after in cuts if prompts <= 0)
    assert_identical(generate(engines.start(max_num_seqs=3), texts, wanted), ours)
