"""Continuations of the texts in the trees of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.engine.v2.graphs import LOOKS_UP, MERGES, Piece
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.merging import counted, merge


class LookupTrees:
    """Trees of a look-up that searches by a kernel, so that a graph may hold it, and the merging of what it finds."""

    def __init__(self, speculator: Any, search: Any):
        """`search`: the look-up's `fused` version."""
        self.speculator, self.search = speculator, search

    def pieces(self) -> dict[Piece, Callable[[], Any]]:
        """One for each number of requests: with trees of the draft, and where it may rest without."""
        kinds = (MERGES, LOOKS_UP) if self.speculator.may_rest else (MERGES,)
        sizes = self.speculator.sizes[::-1]
        return {Piece.of(size, kind): partial(self.merged, size, kind) for size in sizes for kind in kinds}

    def of(self, requests: int, *, drafted: bool) -> tuple[Proposal, Continuations]:
        """Trees of a step, and the continuations in them; the trees are in `drafts` too. `drafted`: those of the draft
        are there."""
        speculator, kind = self.speculator, MERGES if drafted else LOOKS_UP
        padded = speculator.padded(requests)
        if not drafted:
            speculator.drafts.open(0, 0)
        proposal, found = speculator.graphs.run(Piece.of(padded, kind), partial(self.merged, padded, kind))
        return proposal.first(requests), Continuations(*(part[:requests] for part in found))

    def merged(self, requests: int, kind: int) -> tuple[Proposal, Continuations]:
        """Do `of` for so many requests, padding included; a piece, which reads `inputs` and `drafts`."""
        speculator = self.speculator
        inputs, drafts, states = speculator.inputs, speculator.drafts, speculator.states
        pair, nodes, chosen = speculator.pair, speculator.num_speculative_steps, speculator.chosen(requests)
        request, position = inputs.request[:requests], inputs.position[:requests]
        found: Continuations = self.search.search(states.all_token_ids.gpu, states.total_len.gpu, request)
        found = found.only(None if pair.mixes else chosen)
        nothing = partial(Proposal.nothing, requests, nodes, speculator.device)
        proposal = drafts.proposal(requests) if kind == MERGES else nothing()
        proposal = merged_with(pair, proposal, found, chosen, nodes=nodes)
        drafts.store(request, position, proposal, inputs.temperature[:requests])
        return proposal, found


def merged_with(
    pair: Pair, proposal: Proposal, continuations: Continuations, chosen: Tensor | None, *, nodes: int
) -> Proposal:
    """The trees of a pair with continuations in them; `chosen` [R] bool: requests whose children are, None: all."""
    merged = merge(proposal, continuations, nodes=nodes, most=pair.most, max_depth=pair.proposer.max_depth)
    return counted(merged, among=~chosen) if pair.mixes and chosen is not None else merged
