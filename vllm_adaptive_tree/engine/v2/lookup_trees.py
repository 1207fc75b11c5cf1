"""Continuations of the texts in the trees of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Continuations, Lookup
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.graphs import LOOKS_UP, MERGES, Piece
from vllm_adaptive_tree.kernels.merging import merge
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.merging import Merged, merged
from vllm_adaptive_tree.registry import imported


class LookupTrees:
    """Trees of a look-up that searches by a kernel, so that a graph may hold it, and the merging of what it finds."""

    def __init__(self, speculator: Any, search: Any):
        """`search`: the look-up's `fused` version."""
        self.speculator, self.search = speculator, search

    def pieces(self) -> dict[Piece, Callable[[], Any]]:
        """One for each number of requests: with trees of the draft, and where it rests without."""
        speculator = self.speculator
        rests = speculator.may_rest or speculator.pair.looks_up
        merges = speculator.lookup is not None and not speculator.pair.looks_up
        kinds = [MERGES] * merges + [LOOKS_UP] * rests
        sizes = speculator.sizes[::-1]
        return {Piece.of(size, kind): partial(self.merged, size, kind) for size in sizes for kind in kinds}

    def of(self, requests: int, *, drafted: bool) -> tuple[Merged, Continuations]:
        """Trees of a step, and the continuations in them; the trees are in `drafts` too. `drafted`: those of the draft
        are there."""
        speculator, kind = self.speculator, MERGES if drafted else LOOKS_UP
        padded = speculator.padded(requests)
        if not drafted:
            speculator.drafts.open(0, 0)
        trees, found = speculator.graphs.run(Piece.of(padded, kind), partial(self.merged, padded, kind))
        return trees.first(requests), Continuations(*(part[:requests] for part in found))

    def merged(self, requests: int, kind: int) -> tuple[Merged, Continuations]:
        """Do `of` for so many requests, padding included; a piece, which reads `inputs` and `drafts`."""
        speculator = self.speculator
        inputs, drafts, states = speculator.inputs, speculator.drafts, speculator.states
        pair, nodes, chosen = speculator.pair, speculator.num_speculative_steps, speculator.chosen(requests)
        request, position = inputs.request[:requests], inputs.position[:requests]
        found: Continuations = self.search.search(states.all_token_ids.gpu, states.total_len.gpu, request)
        found = found.only(None if pair.mixes else chosen)
        proposal = drafts.proposal(requests) if kind == MERGES else None
        trees = merge(proposal, found, **_limits(pair, chosen, nodes)).padded(nodes)
        drafts.store(request, position, trees.proposal, inputs.temperature[:requests])
        return trees, found


def fused_search(lookup: Lookup | None, device: torch.device) -> Any:
    """The look-up's version whose search is a kernel; None: there is none."""
    path = None if lookup is None or not compiles(device) else vars(type(lookup)).get("fused")
    return None if path is None else imported(path).of(lookup)


def merged_with(
    pair: Pair, proposal: Proposal, continuations: Continuations, chosen: Tensor | None, *, nodes: int
) -> Merged:
    """The trees of a pair with continuations in them; `chosen` [R] bool: requests whose children are, None: all."""
    return merged(proposal, continuations, **_limits(pair, chosen, nodes))


def _limits(pair: Pair, chosen: Tensor | None, nodes: int) -> dict[str, Any]:
    own_draws = chosen if pair.mixes else None
    return {"nodes": nodes, "most": pair.most, "max_depth": pair.proposer.max_depth, "own_draws": own_draws}
