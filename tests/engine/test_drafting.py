"""The trees are drawn from the draft model's law: identity alone would not notice a wrong mask or position there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, TARGET, Engines, generate, runner_of, tree
from vllm_adaptive_tree.engine.v1 import host_draft
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE


def spied_trees(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of every tree: the tokens up to its root, its nodes' tokens, parents and log values, the draft's state there."""
    seen, original = [], host_draft.draft_tree

    def draft_tree(*args: Any, **kwargs: Any) -> Any:
        proposal = original(*args, **kwargs)
        batch, rows, state = proposal.tree, args[2], args[3]
        texts = {
            int(n): runner.input_batch.token_ids_cpu[row, :n].tolist()
            for row, n in enumerate(runner.input_batch.num_tokens_no_spec[: runner.input_batch.num_reqs])
        }
        for r, root in enumerate(state.root.tolist()):
            seen.append((texts[root + 1], batch.tokens[r], batch.parent[r], batch.log_weight[r], rows.hidden[r, 0]))
        return proposal

    monkeypatch.setattr(host_draft, "draft_tree", draft_tree)
    return seen


def assert_the_draft_s(draft: Any, context: list[int], path: list[int], weight: float) -> None:
    with torch.no_grad():
        logits = draft(torch.tensor([context + path])).logits[0, len(context) - 1 : -1]
    law = (logits / GREEDY_DRAFT_TEMPERATURE).log_softmax(-1)
    assert sum(float(law[i, token]) for i, token in enumerate(path)) == pytest.approx(weight, abs=2e-3)


def paths_of(tokens: Tensor, parent: Tensor) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, above in zip(tokens.tolist(), parent.tolist(), strict=True):
        paths.append((paths[above] if above >= 0 else []) + [token])
    return paths


def test_path_probabilities_are_the_draft_s(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines.start(tree(25, threshold=0, max_depth=6), max_num_batched_tokens=128)
    runner = runner_of(llm)
    seen = spied_trees(runner, monkeypatch)
    grow = runner.drafter.grow

    def checked(*args: Any) -> Any:
        rows, state = grow(*args)
        there = args[0] >= 0
        torch.testing.assert_close(runner.drafter.model.compute_logits(rows.hidden[there]), rows.logits[there])
        return rows, state

    monkeypatch.setattr(runner.drafter, "grow", checked)
    asked: list[bool] = []  # draft tokens come with the output of a step: no second call to the worker
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(executor, "take_draft_token_ids", lambda: asked.append(True))
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[9]]  # of unequal lengths, so that a context tells its request
    generate(llm, prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert len(seen) > 15
    assert not asked

    draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    deepest = 0
    for context, tokens, parent, weight, hidden in seen[::4]:
        with torch.no_grad():
            states = draft(torch.tensor([context]), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(hidden, states[0, -1], rtol=1e-3, atol=1e-3)
        paths = paths_of(tokens, parent)
        for node in (0, 5, 12, 20, 24):
            deepest = max(deepest, len(paths[node]))
            assert_the_draft_s(draft, context, paths[node], float(weight[node]))
    assert deepest >= 4


def test_levels_read_their_own_context(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are kept between steps, while requests end, begin, change rows and find their prompts in the cache."""
    llm = engines.start(tree(6, threshold=0, max_depth=3), max_num_batched_tokens=64, max_num_seqs=4)
    seen = spied_trees(runner_of(llm), monkeypatch)
    long = "\n".join(PROMPTS[:6])  # more than a block, and more than a chunk
    prompts = [*PROMPTS[:4], long, *PROMPTS[4:9]]
    lengths = [SamplingParams(temperature=0, max_tokens=5 + 11 * i % 17, ignore_eos=True) for i in range(len(prompts))]
    generate(llm, prompts, lengths)
    generate(llm, [long, *PROMPTS[7:10], long], lengths[:5])
    draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    below = 0
    for context, tokens, parent, weight, _ in seen[::3]:
        path, value = max(zip(paths_of(tokens, parent), weight.tolist(), strict=True), key=lambda one: len(one[0]))
        below += len(path) > 1
        assert_the_draft_s(draft, context, path, value)
    assert below > 20


def test_a_root_has_a_slot_where_all_nodes_are_accepted(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is the target, and a tree that is accepted whole ends at the last slot of its step."""
    llm = engines.start({**tree(3, max_depth=3, threshold=0), "model": TARGET})
    runner, scheduler = runner_of(llm), llm.llm_engine.engine_core.engine_core.scheduler
    catch_up, spare = runner.drafter.catch_up, []

    def checked(items: list[CatchUp], *args: Any) -> Any:
        table = runner.drafter.block_table
        for item in items:
            slots = int(table.num_blocks_per_row[item.row]) * table.block_size
            spare.append(slots - item.start - len(item.tokens))
        return catch_up(items, *args)

    monkeypatch.setattr(runner.drafter, "catch_up", checked)
    generate(llm, PROMPTS[:6], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    assert scheduler.num_lookahead_tokens == 1
    assert min(spare) == 0
