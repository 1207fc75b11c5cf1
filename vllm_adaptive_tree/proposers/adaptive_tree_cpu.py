"""Adaptive trees on CPUs."""

# mypy: disable-error-code="untyped-decorator"

from typing import Any, Self

import numpy as np

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.proposers.acceptance_table import CENTRES, DEPTHS, EDGES, LEAST, MOST, RANKS, SHAPE
from vllm_adaptive_tree.proposers.adaptive_tree import LEAST_LEFT, SPREAD, AdaptiveTree
from vllm_adaptive_tree.proposers.base import KEYS_PER_LEVEL, Request
from vllm_adaptive_tree.proposers.cpu_growth import (
    GROWN,
    KNOWN,
    PATH,
    STEP,
    TREES,
    VALUE,
    CPUBestFirst,
    CPUGrowth,
    Level,
    insert,
    merge,
)
from vllm_adaptive_tree.proposers.draw_scan import draw
from vllm_adaptive_tree.proposers.row_scan import CHUNK, SCAN, next_best, probability
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.rng_compiled import key_of

BINS, GROUP = SHAPE[3], SHAPE[2] * SHAPE[3]
BIN_EDGES, BIN_CENTRES, GROUP_OF_RANK, GROUP_OF_DEPTH = (
    np.array(EDGES, np.float32),
    np.array(CENTRES, np.float32),
    np.array(RANKS),
    np.array(DEPTHS),
)


class AdaptiveTreeCPU(CPUBestFirst, AdaptiveTree):
    """Adaptive trees by `CPUBestFirst`. Children are drawn only while one more could enter the tree."""

    @classmethod
    def of(cls, proposer: AdaptiveTree) -> Self:
        made = cls(max_depth=proposer.max_depth, max_children=proposer.max_children, drawn_from=proposer.drawn_from)
        made.acceptance = proposer.acceptance
        return made

    def planned(self, nodes: int, vocabulary: int) -> int:
        return min(self.max_children, vocabulary)

    def key(self, request: Request) -> Any:
        """First cell of each request at depth 1, whether its children are chosen, and of its draws the seed and the
        place: [R]."""
        rng = request.rng
        assert isinstance(rng, CounterRNG), "compiled draws are those of a CounterRNG"
        chosen = request.greedy if request.chosen is None else request.chosen
        row = self.acceptance.row(request.temperature, request.greedy, chosen, 1)
        place = 8 * rng.position.numpy() + rng.purpose
        return row.numpy(), np.ascontiguousarray(chosen.numpy()), np.ascontiguousarray(rng.seed.numpy()), place

    def grow(self, level: Level, growth: CPUGrowth) -> None:
        fanout = min(self.max_children, max(level.scan.logits.shape[1], level.scan.bits.shape[1]))
        chance = self.acceptance.chance.numpy().ravel()
        _grow(tuple(level.scan), *level[1:], growth.key, chance, fanout)


@njit()
def _look_up(chance, row, rank, conditional):  # type: ignore[no-untyped-def]
    """`AcceptanceTable.look_up` of one node."""
    place = 0
    while place < BINS - 1 and BIN_EDGES[place] <= conditional:
        place += 1
    first = row + GROUP_OF_RANK[min(rank, len(GROUP_OF_RANK) - 1)] * BINS
    left = min(max(place - (conditional < BIN_CENTRES[place]), 0), BINS - 2)
    low, high = BIN_CENTRES[left], BIN_CENTRES[left + 1]
    share = (conditional - low) / (high - low)
    start, rise = chance[first + left], chance[first + left + 1] - chance[first + left]
    found = start + share * rise if share < np.float32(0.5) else start + rise - rise * (np.float32(1) - share)
    return first + place, min(max(found, np.float32(LEAST)), np.float32(MOST))


@njit()
def _expected(chance, row, rank, share):  # type: ignore[no-untyped-def]
    """`AdaptiveTree._expected` of one slot; `share` of the best token in what is left."""
    _, of_best = _look_up(chance, row, rank, share)
    _, of_others = _look_up(chance, row, rank, (np.float32(1) - share) / np.float32(SPREAD))
    return of_others + share * (of_best - of_others)


@njit(
    f"({SCAN}, {KNOWN}, {TREES}, {GROWN}, {STEP},"
    " Tuple((int64[::1], boolean[::1], int64[::1], int64[::1])), float32[::1], int64)"
)
def _grow(scan, known, trees, grown, step, keys, chance, fanout):  # type: ignore[no-untyped-def]
    """Add a level: slots below the frontier, as `AdaptiveTree.candidates`."""
    n, width, best = trees[1].shape[1], known.shape[2], trees[1]
    values, columns = np.empty((2, n), np.float32), np.empty((3, n), np.int64)
    tokens, one = np.empty(fanout, np.int64), np.float32(1)
    maxima, sums = np.empty(scan[4].shape[1], np.float32), np.empty(scan[5].shape[1])
    wide, weights = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    depth = min(step[2], len(GROUP_OF_DEPTH)) - 1
    for r in range(known.shape[1]):
        found, first, chosen = 0, keys[0][r] + GROUP_OF_DEPTH[depth] * GROUP, keys[1][r]
        key = key_of(keys[2][r], keys[3][r])
        values.fill(-np.inf)
        for w in range(width):
            path, above, row = known[PATH, r, w], known[VALUE, r, w], r * width + w
            if path == -np.inf:
                continue
            gone, rejected, before, place = 0.0, 0.0, above, (step[2] - 1) * KEYS_PER_LEVEL + w
            maxima[:], sums[:] = scan[4][row], scan[5][row]
            token, logit, without = -1, np.float32(np.inf), False
            if not chosen:
                mode, logit = next_best(scan, row, maxima, token, logit, wide)
                share = probability(scan, row, logit)
            for rank in range(fanout):
                left = one if rank == 0 else max(one - np.float32(gone), np.float32(LEAST_LEFT))
                slot = path + np.float32(rejected)
                if not min(slot, before) > max(best[r, n - 1], values[VALUE, n - 1]):
                    break  # nor do later ones enter the tree
                if chosen:
                    token, logit = next_best(scan, row, maxima, token, logit, wide)
                else:
                    of_best = np.float32(0) if without else min(share / left, one)
                    before = min(slot + np.log(_expected(chance, first, rank, of_best)), before)
                    if not before > max(best[r, n - 1], values[VALUE, n - 1]):
                        break
                    token, logit = draw(scan, row, sums, key, place, tokens[:rank], wide, weights)
                    tokens[rank], without = token, without or token == mode
                q = probability(scan, row, logit)
                if token < 0 or not q > 0:
                    break
                cell, accepted = _look_up(chance, first, rank, q / left)
                below = slot + np.log(accepted)
                value = min(below, above) if chosen else before
                found = insert(found, values, columns, value, below, token, w, cell)
                gone += q
                rejected += np.log(one - accepted)
        merge(r, found, values, columns, known[PATH, r], trees, grown, step)
