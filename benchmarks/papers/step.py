"""One step of many requests: what acceptance asks for, read when it is asked."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.papers.llama import Cache
from benchmarks.papers.models import models, read_one
from vllm_adaptive_tree.acceptance import Accepted, Children, longest_continuation, traversal, walk
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import TreeBatch


class Step:
    """One step of R requests.

    Args:
        temperature: of the target.
        cache: the target's, of these requests.
        root: [R] position of the root.
        token: [R] the root's.
        text: [R, L] what the target says greedily from the root on, where that is known.
        seed: [R].
    """

    def __init__(
        self, temperature: float, cache: Cache, root: Tensor, token: Tensor, text: Tensor | None, seed: Tensor
    ):
        self.temperature, self.cache, self.root, self.token, self.text = temperature, cache, root, token, text
        self.seed = seed

    def accept(self, pair: Pair, proposal: Proposal, below: Tensor, q_temperature: Tensor) -> Accepted:
        """`below`: the draft's logits [R, slots, V]; `q_temperature`: [R]."""
        self._drafted(proposal, below, q_temperature)
        if pair.rule.draw is None:
            levels, rng = int(self.tree.depth.max()), self._rng(1)
            return traversal(
                self.tree, pair.proposer.kind, self.p, self.q, rng, levels=levels, most=pair.most, proceed=any_active
            )
        return walk(self.tree, self._by_rule(pair), levels=int(self.tree.depth.max()), proceed=any_active)

    def accept_longest(
        self, pair: Pair, proposal: Proposal, below: Tensor, q_temperature: Tensor, initial: Tensor
    ) -> tuple[Accepted, Tensor]:
        """With target initialisation, as the engine does it: the last token is held back for the next first layer.

        Args:
            initial: [R, W] the first layers that the target has drawn, -1 where it has not.

        Returns:
            What is emitted, and the first layer [R, W] of the next tree.
        """
        self._drafted(proposal, below, q_temperature)
        levels = int(self.tree.depth.max())
        count = (initial >= 0).sum(1)
        found = longest_continuation(
            self.tree, count, self._by_rule(pair), levels=levels, most=pair.init_width, proceed=any_active
        )
        last, level = torch.zeros(len(count), models().target.embedding.shape[0]), -1

        def again(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal last, level
            last, level = torch.where(active[:, None], self.logits(node, active), last), level + 1
            return found.tokens[:, level].clamp(min=0), found.nodes[:, level] >= 0

        tokens, nodes = walk(self.tree, again, levels=levels, proceed=any_active)  # the cache holds another path
        accepted = (nodes >= 0).sum(1)
        first = tokens.gather(1, accepted[:, None])
        p = softmax_at(last, torch.full_like(last[:, 0], self.temperature or 1.0)).scatter(1, first, 0.0)
        fanout = torch.full_like(first, pair.init_width - 1)
        rng, greedy = self._rng(2).fold_in(torch.zeros_like(first)), torch.full_like(count, self.temperature == 0)
        others = draw_children("without_replacement", p[:, None], fanout, pair.init_width - 1, rng, greedy.bool())[:, 0]
        held = (accepted > 0)[:, None]
        kept = tokens.scatter(1, accepted[:, None], torch.where(held, -1, first))
        return Accepted(kept, nodes), torch.cat([first, others], 1).masked_fill(~held, -1)

    def _drafted(self, proposal: Proposal, below: Tensor, q_temperature: Tensor) -> None:
        self.tree, self.below, self.proposal, self.q_temperature = proposal.tree, below, proposal, q_temperature

    def _rng(self, purpose: int) -> CounterRNG:
        return CounterRNG(self.seed, self.root, purpose=purpose)

    def _by_rule(self, pair: Pair) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        draw, ignores_q = pair.rule.draw, pair.rule_name == "target_only"
        assert draw is not None
        widest, rng = max(_widest(self.tree), 1), self._rng(1)

        def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            p = self.p(node, active)
            if ignores_q:
                q, children = p, Children(node[:, None], node, pair.most)
            else:
                q, drawn = self.q(node)
                children = Children(self.tree.children(node, widest), drawn, pair.most)
            return draw(p, q, children, rng.fold_in(node + 1)), active

        return by_rule

    def p(self, node: Tensor, active: Tensor) -> Tensor:
        """Target law [R, V] behind `node` [R]; anything where not active."""
        if self.text is not None:
            said = self.text.gather(1, self._depth(node)[:, None])
            return torch.zeros(len(node), models().target.embedding.shape[0]).scatter(1, said, 1.0)
        logits = self.logits(node, active)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1.0)
        return softmax_at(logits, torch.full((len(node),), self.temperature))

    def logits(self, node: Tensor, active: Tensor) -> Tensor:
        """The target's [R, V] behind `node` [R], which it reads; 0 where not active."""
        token = torch.where(node < 0, self.token, self.tree.tokens.gather(1, node.clamp(min=0)[:, None])[:, 0])
        asked = active.nonzero()[:, 0]
        found = torch.zeros(len(node), models().target.embedding.shape[0])
        if len(asked):
            position = (self.root + self._depth(node))[asked]
            found[asked] = models().target.logits(read_one(models().target, self.cache, token[asked], position, asked))
        return found

    def _depth(self, node: Tensor) -> Tensor:
        return torch.where(node < 0, 0, self.tree.depth.gather(1, node.clamp(min=0)[:, None])[:, 0])

    def q(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Draft law [R, V] behind `node` [R], zero where it was never read, and how many children were planned [R]."""
        slot = torch.where(node < 0, 0, self.proposal.read.gather(1, node.clamp(min=0)[:, None])[:, 0])
        q = softmax_at(self.below[torch.arange(len(node)), slot.clamp(min=0)], self.q_temperature)
        drawn = self.proposal.num_planned.gather(1, node[:, None] + 1)[:, 0]
        return q.masked_fill((slot < 0)[:, None], 0.0), drawn.masked_fill(slot < 0, 0)


def _widest(tree: TreeBatch) -> int:
    """The most children of a node."""
    children = torch.zeros(len(tree.tokens), tree.tokens.shape[1] + 1)
    return int(children.scatter_add(1, tree.parent + 1, tree.valid.float()).max())


def any_active(active: Tensor) -> bool:
    return bool(active.any())
