"""OPT-Tree: the draft tree with the largest expected acceptance (Wang et al., arXiv 2406.17276, Algorithm 1)."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.proposers.base import Frontier
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class Growth(NamedTuple):
    """The n best nodes of all levels drafted so far; by Theorem 3.1 they form a tree, and hold every node that any
    later level can still need: a child's weight never exceeds its parent's."""

    best: TreeBatch  # [R, n], by weight descending, ties to the shallower node
    drafted: Tensor  # [R, n] int64: the drafter's number of each node, -1 before it was read
    gain: Tensor  # [R]: growth of E(A) by the last level
    level: int
    read: int  # nodes given to the drafter so far, the root included
    temperature: Tensor  # [R]


class OptTree:
    """Per level the n most probable paths; stop when E(A) gains no more than `threshold`; keep the n best of all.

    E(A), the expected acceptance length, is the sum of the path probabilities of the nodes (eq. 4; the root's 1 is
    left out). Its growth per level never increases, so the first stop is the best one.
    """

    def __init__(self, *, max_depth: int, threshold: float):
        self.max_depth = max_depth
        self.threshold = threshold

    def begin(self, logits: Tensor, *, nodes: int, temperature: Tensor) -> Growth:
        law = log_law(logits, temperature)  # [R, V]
        weight, token = law.topk(min(nodes, law.shape[-1]))  # [R, n], sorted
        best = TreeBatch(
            tokens=token.masked_fill(weight == -torch.inf, EMPTY),
            parent=torch.full_like(token, -1),
            depth=torch.ones_like(token).masked_fill(weight == -torch.inf, 0),
            log_weight=weight,
        )
        best = _widen(best, nodes)
        return Growth(best, torch.full_like(best.tokens, -1), weight.exp().sum(1), 1, 1, temperature)

    def growing(self, growth: Growth) -> Tensor:
        return (growth.gain > self.threshold) & (growth.level < self.max_depth)

    def frontier(self, growth: Growth) -> Frontier:
        """The last level's nodes among the n best, packed to the left; the others' children could not enter."""
        slot, used = self._last_level(growth)
        best = growth.best
        above = growth.drafted.gather(1, best.parent.clamp(min=0)).masked_fill(best.parent < 0, 0)
        return Frontier(best.tokens.gather(1, slot).masked_fill(~used, EMPTY), above.gather(1, slot))

    def extend(self, growth: Growth, logits: Tensor) -> Growth:
        best, width = growth.best, logits.shape[1]
        nodes = best.tokens.shape[1]
        slot, used = (x[:, :width] for x in self._last_level(growth))  # [R, W]
        law = log_law(logits, growth.temperature[:, None])  # [R, W, V]
        weight, token = law.topk(min(nodes, law.shape[-1]))  # [R, W, k]
        weight = weight + best.log_weight.gather(1, slot)[:, :, None]
        weight = weight.masked_fill(~used[:, :, None], -torch.inf).flatten(1)
        weight, index = weight.topk(min(nodes, weight.shape[1]))  # [R, n]
        level = TreeBatch(  # candidates of weight -inf never pass the empty slots of `best`
            tokens=token.flatten(1).gather(1, index),
            parent=slot.gather(1, index // token.shape[-1]),
            depth=torch.full_like(index, growth.level + 1),
            log_weight=weight,
        )
        numbers = (growth.read + torch.arange(width, device=slot.device)).expand_as(slot)
        drafted = growth.drafted.scatter(1, slot, torch.where(used, numbers, growth.drafted.gather(1, slot)))
        merged, drafted = _best_of(best, _widen(level, nodes), drafted)
        gain = merged.log_weight.exp().sum(1) - best.log_weight.exp().sum(1)
        gain = torch.where(self.growing(growth), gain, 0.0)
        return Growth(merged, drafted, gain, growth.level + 1, growth.read + width, growth.temperature)

    def _last_level(self, growth: Growth) -> tuple[Tensor, Tensor]:
        """Slots of `best` [R, n] with the growing trees' last level first, and which of them those are."""
        last = (growth.best.depth == growth.level) & self.growing(growth)[:, None]
        used, slot = last.sort(dim=1, descending=True, stable=True)
        return slot, used

    def finish(self, growth: Growth) -> TreeBatch:
        return growth.best


def log_law(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) in at least float32; `temperature` lacks the last dimension."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(dtype) / temperature[..., None]).log_softmax(-1)


def _best_of(best: TreeBatch, level: TreeBatch, drafted: Tensor) -> tuple[TreeBatch, Tensor]:
    """The n best of n nodes and their n new children. A stable sort keeps the older of two equal nodes in front, so a
    child never outlives its parent."""
    nodes = best.tokens.shape[1]
    weight = torch.cat([best.log_weight, level.log_weight], 1)
    order = weight.sort(dim=1, descending=True, stable=True).indices  # [R, 2n]: rank -> slot
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(2 * nodes, device=order.device).expand_as(order))
    keep = order[:, :nodes]

    def pick(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old, new], 1).gather(1, keep)

    parent = pick(best.parent, level.parent)  # slots of `best`
    parent = torch.where(parent < 0, -1, rank.gather(1, parent.clamp(min=0)))
    merged = TreeBatch(
        pick(best.tokens, level.tokens), parent, pick(best.depth, level.depth), pick(best.log_weight, level.log_weight)
    )
    return merged, pick(drafted, torch.full_like(drafted, -1))


def _widen(tree: TreeBatch, nodes: int) -> TreeBatch:
    """Pad with empty slots up to `nodes` (a vocabulary smaller than the budget)."""
    missing = nodes - tree.tokens.shape[1]
    fills = (EMPTY, -1, 0, -torch.inf)
    return TreeBatch(
        *(torch.nn.functional.pad(x, (0, missing), value=fill) for x, fill in zip(tree, fills, strict=True))
    )
