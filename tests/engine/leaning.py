"""Random heads that agree with the target: their rows get a bonus by the position of the token that they predict.

A head that predicts a few candidates has those with the highest bonus among them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine.engines import V2
from vllm_adaptive_tree.drafters import Rows

Prompt = Sequence[int]
Bonus = Callable[[Prompt, int], Tensor]
"""The prompt of a request and a position -> [V], added to the logits of the token there."""


def lean(runner: Any, bonus: Bonus, change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Add a bonus to every row of a head; `change`: `monkeypatch.setattr`, or for good."""
    drafter = runner.speculator if V2 else runner.drafter
    begin, grow = drafter.roots if V2 else drafter.catch_up, drafter.grow
    roots: list[tuple[Prompt, int]] = []
    model = getattr(drafter, "model", None)

    def caught_up(items: list[Any], *args: Any) -> tuple[Rows, Any]:
        names = runner.input_batch.req_ids
        trees = [(runner.requests[names[one.row]], one.root) for one in items if one.root is not None]
        roots[:] = [(request.prompt_token_ids, root) for request, root in trees]
        return leaning(begin(items, *args))

    def rooted(requests: int) -> tuple[Rows, Any]:
        inputs, states = drafter.inputs, runner.req_states
        of = inputs.request[:requests].tolist()
        prompts = [states.all_token_ids.gpu[one, : states.prompt_len.np[one]].tolist() for one in of]
        roots[:] = zip(prompts, inputs.position[:requests].tolist(), strict=True)
        return leaning(begin(requests))

    def leaning(found: tuple[Rows, Any]) -> tuple[Rows, Any]:
        for row, (prompt, root) in enumerate(roots):
            found[0].logits[row, 0] += bonus(prompt, root + 1)
        return found

    def candidates(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.compute_logits(hidden)  # [R * K, V]
        wanted, levels = logits.clone(), len(hidden) // len(roots)
        for at, row in enumerate(wanted):
            prompt, root = roots[at // levels]
            row += 10 * bonus(prompt, root + 1 + at % levels)
        best = wanted.topk(own(hidden)[0].shape[1]).indices
        return best, logits.log_softmax(1).gather(1, best)

    def grown(tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        rows, state = grow(tokens, parent, state)
        depths = state.depth[:, -tokens.shape[1] :].tolist()
        for row, (prompt, root) in enumerate(roots):
            for column, depth in enumerate(depths[row]):
                rows.logits[row, column] += bonus(prompt, root + 1 + depth)
        return rows, state

    change(drafter, *(("roots", rooted) if V2 else ("catch_up", caught_up)))
    change(drafter, "grow", grown)
    own = getattr(model, "compute_candidates", None)
    if own is not None:
        change(model, "compute_candidates", candidates)


def second_best(known: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: int) -> Bonus:
    """Bonus for the greedy outputs `known`, with their prompts; another token may get a higher one: accepted paths then
    pass through any child."""
    texts = {tuple(prompt): [*prompt, *output] for prompt, output in known}

    def bonus(prompt: Prompt, position: int) -> Tensor:
        found, text = torch.zeros(vocabulary), texts[tuple(prompt)]
        if position < len(text):
            found[text[position]] = 20.0
            found[(text[position] + 1 + position % 7) % vocabulary] = 20.2 if position % 2 else 19.8
        return found

    return bonus
