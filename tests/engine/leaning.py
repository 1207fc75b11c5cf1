"""Random heads that agree with the target: their rows get a bonus by the position of the token that they predict."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.engines import runner_of
from vllm_adaptive_tree.drafters import Rows

Bonus = Callable[[Any, int], Tensor]
"""A request (vLLM's state of it) and a position -> [V], added to the logits of the token there."""


def lean(llm: Any, bonus: Bonus, patch: pytest.MonkeyPatch) -> None:
    """Add it to every row of a head of Model Runner V1."""
    runner = runner_of(llm)
    catch_up, grow = runner.drafter.catch_up, runner.drafter.grow
    roots: list[tuple[Any, int]] = []

    def caught_up(items: list[Any], *args: Any) -> tuple[Rows, Any]:
        rows, state = catch_up(items, *args)
        names = runner.input_batch.req_ids
        roots[:] = [(runner.requests[names[one.row]], one.root) for one in items if one.root is not None]
        for row, (request, root) in enumerate(roots):
            rows.logits[row, 0] += bonus(request, root + 1)
        return rows, state

    def grown(tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        rows, state = grow(tokens, parent, state)
        depths = state.depth[:, -tokens.shape[1] :].tolist()
        for row, (request, root) in enumerate(roots):
            for column, depth in enumerate(depths[row]):
                rows.logits[row, column] += bonus(request, root + 1 + depth)
        return rows, state

    patch.setattr(runner.drafter, "catch_up", caught_up)
    patch.setattr(runner.drafter, "grow", grown)


def second_best(texts: list[list[int]], vocabulary: int) -> Bonus:
    """The greedy `texts` (prompt and output) are known, but another token may seem better: accepted paths then pass
    through any child."""

    def bonus(request: Any, position: int) -> Tensor:
        found = torch.zeros(vocabulary)
        prompt = request.prompt_token_ids
        text = next(text for text in texts if text[: len(prompt)] == prompt)
        if position < len(text):
            found[text[position]] = 20.0
            found[(text[position] + 1 + position % 7) % vocabulary] = 20.2 if position % 2 else 19.8
        return found

    return bonus
