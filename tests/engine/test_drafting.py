"""The trees are drawn from the draft model's law: identity alone would not notice a wrong mask or position there."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, Engines, generate, runner_of, tree
from vllm_adaptive_tree.engine import runner_v1
from vllm_adaptive_tree.methods import GREEDY_DRAFT_TEMPERATURE


def test_path_probabilities_are_the_draft_s(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines.start(tree(25, threshold=0, max_depth=6), max_num_batched_tokens=128)
    runner, seen = runner_of(llm), []
    original = runner_v1.draft_tree

    def draft_tree(*args: Any, **kwargs: Any) -> Any:
        proposal = original(*args, **kwargs)
        batch, rows, state = proposal.tree, args[2], args[3]
        texts = {
            int(n): runner.input_batch.token_ids_cpu[row, :n].tolist()
            for row, n in enumerate(runner.input_batch.num_tokens_no_spec[: runner.input_batch.num_reqs])
        }
        for r, root in enumerate(state.root_position.tolist()):
            seen.append((texts[root + 1], batch.tokens[r], batch.parent[r], batch.log_weight[r], rows.hidden[r, 0]))
        return proposal

    monkeypatch.setattr(runner_v1, "draft_tree", draft_tree)
    grow = runner.drafter.grow

    def checked(*args: Any) -> Any:
        rows, state = grow(*args)
        there = args[0] >= 0
        torch.testing.assert_close(runner.drafter.model.compute_logits(rows.hidden[there]), rows.logits[there])
        return rows, state

    monkeypatch.setattr(runner.drafter, "grow", checked)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[9]]  # of unequal lengths, so that a context tells its request
    generate(llm, prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert len(seen) > 15

    draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    deepest = 0
    for context, tokens, parent, weight, hidden in seen[::4]:
        with torch.no_grad():
            states = draft(torch.tensor([context]), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(hidden, states[0, -1], rtol=1e-3, atol=1e-3)
        paths: list[list[int]] = []
        for node in range(25):
            paths.append((paths[parent[node]] if parent[node] >= 0 else []) + [int(tokens[node])])
        for node in (0, 5, 12, 20, 24):
            path = paths[node]
            deepest = max(deepest, len(path))
            with torch.no_grad():
                logits = draft(torch.tensor([context + path])).logits[0, len(context) - 1 : -1]
            law = (logits / GREEDY_DRAFT_TEMPERATURE).log_softmax(-1)
            expected = sum(float(law[i, token]) for i, token in enumerate(path))
            assert expected == pytest.approx(float(weight[node]), abs=2e-3)
    assert deepest >= 4
