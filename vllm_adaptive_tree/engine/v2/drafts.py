"""Drafted trees between two steps, on the device, with the distributions that their nodes were sampled from."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.kernels.layout import Drafted
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.trees import TreeBatch

NOWHERE = -1


class DraftProbs(NamedTuple):
    """Distributions that the children of R trees were sampled from. Entry 0 of a row is the root, entry 1 + i node
    i."""

    logits: Tensor | None  # [B, S, V] of the draft model, of the whole batch that drafted; None if none were kept
    temperature: Tensor  # [B]
    place: Tensor  # [R] in that batch
    slot: Tensor  # [R, 1 + N] of `logits`, -1: never read
    num_planned: Tensor  # [R, 1 + N] children planned for a node
    chosen: Tensor | None  # [B, N] bool: nodes that a look-up has chosen, in generation order; None: there is none
    initial: Tensor | None  # [B]: leading nodes that the target has sampled itself; None: there are none
    unread: Tensor  # [1, 1, V] logits in place of those that the draft has not made, where no node was drawn

    def after(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """q [R, V] after `node` [R] (-1: the root) and the number of children planned [R]; zeros for unread nodes."""
        at = (node + 1)[:, None]
        slot, planned = self.slot.gather(1, at)[:, 0], self.num_planned.gather(1, at)[:, 0]
        planned = planned.masked_fill(slot < 0, 0)
        if self.logits is None:
            return self.temperature.new_zeros(len(node), self.unread.shape[2]), planned
        q = softmax_at(self.logits[self.place, slot.clamp(min=0)], self.temperature[self.place])
        return q.masked_fill((slot < 0)[:, None], 0.0), planned

    def permuted(self, order: Tensor) -> "DraftProbs":
        """Same distributions with node `order[r, i]` ([R, N]) as node i."""
        entry = torch.cat([torch.zeros_like(order[:, :1]), order + 1], 1)
        return self._replace(slot=self.slot.gather(1, entry), num_planned=self.num_planned.gather(1, entry))


class Drafts:
    """Trees of the last batch that drafted, by vLLM's index of the request, in persistent buffers."""

    def __init__(self, requests: int, trees: int, nodes: int, vocabulary: int, device: torch.device):
        """`requests`: most of the engine; `trees`: most of a batch."""
        number = torch.full((requests + 1,), NOWHERE, device=device)  # the last one is that of padding
        whole = torch.full((trees, nodes), -1, device=device)
        self.place, self.root = number, number.clone()  # of each request's tree, and the position of its root
        value = torch.full((trees, nodes), -torch.inf, device=device)
        self.tree = TreeBatch(whole, whole.clone(), torch.zeros_like(whole), value)
        self.read, self.planned = whole.clone(), torch.zeros(trees, 1 + nodes, dtype=torch.int64, device=device)
        self.temperature = torch.ones(trees, device=device)
        self.cell: Tensor | None = None
        """Cells of the nodes [trees, N], if the proposer learns acceptance."""
        self.chosen: Tensor | None = None
        """[trees, N] bool: nodes that a look-up has chosen, if they may stand among drawn ones."""
        self.initial: Tensor | None = None
        """[trees]: leading nodes that the target has sampled itself, if the pair asks for them."""
        self.shape = 0, 0
        """Shape of the last batch: B, S."""
        self.kept: Tensor | None = None
        """Logits of the nodes that the draft has read, [B * S or more, V]."""
        self.most_kept = 0
        """Rows of that, if it is known which batch has most: a graph may hold the buffer, so it never grows."""
        self.unread = self.temperature.new_zeros(1, 1, vocabulary)
        """Logits [1, 1, V] in place of those that the draft has not made, where no node was drawn: of its type."""

    def open(self, requests: int, slots: int) -> None:
        """Prepare for trees of so many requests; `keep` gets the logits of at most so many slots of each. 0: none, as
        for trees of a text."""
        self.shape = requests, slots

    def keep(self, logits: Tensor, first: int) -> None:
        """Keep logits [B, W, V] of the slots from `first` on."""
        requests, slots = self.shape
        if self.kept is None or len(self.kept) < requests * slots:
            self.kept = logits.new_zeros(max(requests * slots, self.most_kept), logits.shape[2])
            self.unread = self.kept[:1][None]
        whole = self.kept[: requests * slots].unflatten(0, self.shape)
        whole[:, first : first + logits.shape[1]] = logits

    @property
    def logits(self) -> Tensor | None:
        """Kept logits [B, S, V], the roots' first; None if none were kept."""
        requests, slots = self.shape
        return self.kept[: requests * slots].unflatten(0, self.shape) if self.kept is not None and slots else None

    def store(self, request: Tensor, root: Tensor, proposal: Proposal, temperature: Tensor) -> None:
        """Store trees of B requests with their roots at the positions `root` [B], in place of all others."""
        self.place.fill_(NOWHERE)
        self.place[request] = torch.arange(len(request), device=request.device)
        self.root[request] = root
        new = (*proposal.tree, proposal.read, proposal.num_planned, temperature)
        for buffer, part in zip((*self.tree, self.read, self.planned, self.temperature), new, strict=True):
            buffer[: len(request)] = part
        # the trees of a look-up have no cells, and must not count in those of others
        for kept, given, none in ((self.cell, proposal.cell, -1), (self.chosen, proposal.chosen, 0)):
            if kept is not None:
                own = kept[: len(request)]
                own.fill_(none) if given is None else own.copy_(given)

    def proposal(self, requests: int) -> Proposal:
        """The first trees, as they were stored."""
        return Proposal(self.tree, self.read, self.planned, self.cell).first(requests)

    @property
    def padding(self) -> int:
        """Index of no request."""
        return len(self.place) - 1

    def forget(self) -> None:
        """Drop the trees: they have been verified, and no others follow."""
        self.place.fill_(NOWHERE)

    @property
    def drafted(self) -> Drafted:
        """Trees for `Layout.update`."""
        return Drafted(self.tree, self.read, self.planned, self.place, self.root)

    def of(self, request: Tensor, root: Tensor, scheduled: Tensor) -> tuple[TreeBatch, DraftProbs]:
        """Trees of R requests with roots at positions `root` [R], cut to the `scheduled` [R] nodes; empty if the
        last batch drafted nothing for that root."""
        place = self.place[request]
        known = (place >= 0) & (self.root[request] == root)
        place = place.clamp(min=0)
        cut = TreeBatch(*(part[place] for part in self.tree)).cut(torch.where(known, scheduled, 0))
        exists = cut.valid.any(1, keepdim=True)
        slot = torch.cat([torch.where(exists, 0, -1), self.read[place].masked_fill(~cut.valid, -1)], 1)
        return cut, self.probs(place, slot, self.planned[place])

    def probs(self, place: Tensor, slot: Tensor, planned: Tensor) -> DraftProbs:
        """Distributions of trees at `place` [R]; `slot`, `planned` [R, 1 + N]."""
        return DraftProbs(self.logits, self.temperature, place, slot, planned, self.chosen, self.initial, self.unread)
