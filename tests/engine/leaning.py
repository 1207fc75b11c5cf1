"""Random heads that agree with the target: their rows get a bonus by the position of the token that they predict."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Rows

Bonus = Callable[[Any, int], Tensor]
"""A request (vLLM's state of it) and a position -> [V], added to the logits of the token there."""


def lean(runner: Any, bonus: Bonus, change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Add it to every row of a head, in a `runner` of Model Runner V1; `change`: `monkeypatch.setattr`, or for good."""
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

    change(runner.drafter, "catch_up", caught_up)
    change(runner.drafter, "grow", grown)


def second_best(known: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: int) -> Bonus:
    """The greedy outputs are `known`, with their prompts, but another token may seem better: accepted paths then pass
    through any child."""
    texts = {tuple(prompt): [*prompt, *output] for prompt, output in known}

    def bonus(request: Any, position: int) -> Tensor:
        found, text = torch.zeros(vocabulary), texts[tuple(request.prompt_token_ids)]
        if position < len(text):
            found[text[position]] = 20.0
            found[(text[position] + 1 + position % 7) % vocabulary] = 20.2 if position % 2 else 19.8
        return found

    return bonus
