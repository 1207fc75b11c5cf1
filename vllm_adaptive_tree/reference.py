"""Tree speculative decoding in plain PyTorch with two Hugging Face models: the whole method in a hundred lines.

No cache, no mask, no batch: every node is read as a sequence of its own. It is slow, and meant for reading, for
research, and as the oracle of the engine's tests. It works with any proposer and rule.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES, Children, traversal, walk
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.proposers import Proposer, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG


class Step(NamedTuple):
    tokens: list[int]  # of the drafted tree, in generation order
    parents: list[int]
    emitted: list[int]  # the accepted path and the bonus token


class PathDrafter:
    """Drafter over a model that reads whole sequences; the state is the sequence of every slot."""

    def __init__(self, model: Any):
        self.model = model

    def catch_up(self, accepted: list[int], target_hidden: Tensor | None = None) -> tuple[Rows, list[list[int]]]:
        return Rows(last_logits(self.model, accepted)[None, None]), [accepted]

    def grow(self, tokens: Tensor, parent: Tensor, state: list[list[int]]) -> tuple[Rows, list[list[int]]]:
        pairs = zip(tokens[0].tolist(), parent[0].tolist(), strict=True)
        new = [[*state[above], max(token, 0)] for token, above in pairs]
        return Rows(torch.stack([last_logits(self.model, sequence) for sequence in new])[None]), state + new


def last_logits(model: Any, sequence: list[int]) -> Tensor:
    """Logits after the last token, [V] float32."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([sequence])).logits[0, -1].float()
    return logits


def decode_step(
    target: Any,
    draft: Any,
    sequence: list[int],
    *,
    proposer: Proposer,
    rule: str,
    nodes: int,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
    seed: int = 0,
) -> Step:
    """Decode a step after `sequence`; its last token is the root. `temperature` 0: greedy; `rule`: a key of `RULES`."""
    position = torch.tensor([len(sequence) - 1])

    def rng(purpose: int) -> CounterRNG:
        return CounterRNG(torch.tensor([seed]), position, purpose)

    # 1 draft
    levels: list[Tensor] = []
    rows, state = (drafter := PathDrafter(draft)).catch_up(sequence)
    request = Request(torch.tensor([draft_temperature]), torch.tensor([temperature == 0]), rng(0))
    tree, read, num_planned, *_ = draft_tree(
        proposer, drafter, rows, state, nodes=nodes, request=request, keep=levels.append
    )
    size = int(tree.valid.sum())
    tokens, parents = tree.tokens[0, :size].tolist(), tree.parent[0, :size].tolist()
    draft_logits = torch.cat(levels, 1)[0]  # [slots, V]: the draft's logits at each slot

    # 2 verify: target and draft distributions at a node (-1: the root)
    def path(node: int) -> list[int]:
        return [*path(parents[node]), tokens[node]] if node >= 0 else sequence

    def p_rows(node: Tensor, active: Tensor) -> Tensor:
        logits = last_logits(target, path(int(node)))[None]
        if temperature == 0:
            return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1.0)
        return softmax_at(logits, torch.tensor([temperature]))

    def q_rows(node: Tensor) -> tuple[Tensor, Tensor]:
        slot = 0 if node < 0 else int(read[0, node])
        return softmax_at(draft_logits[[max(slot, 0)]], torch.tensor([draft_temperature])), num_planned[
            :, int(node) + 1
        ]

    # 3 accept
    draw, most = RULES[rule].draw, min(nodes, proposer.max_children)

    def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        assert draw is not None
        q, planned = q_rows(node)
        token = draw(
            p_rows(node, active), q, Children(tree.children(node, most), planned, most), rng(1).fold_in(node + 1)
        )
        return token, torch.ones_like(active)

    depth = int(tree.depth.max())
    if draw is None:
        accepted = traversal(tree, proposer.kind, p_rows, q_rows, rng(1), levels=depth, most=most, proceed=bool)
    else:
        accepted = walk(tree, by_rule, levels=depth, proceed=bool)
    return Step(tokens, parents, [token for token in accepted.tokens[0].tolist() if token >= 0])
