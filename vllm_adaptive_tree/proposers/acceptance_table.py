"""Learnt probability that verification accepts a node which it reaches."""

# mypy: disable-error-code="untyped-decorator"

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.json_numbers import member, numbers, short

EDGES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.9)
"""Bounds of the bins of a node's conditional probability: that of its token among those its earlier siblings left."""
CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
RANKS = (0, 1, 2, 2, 3)
"""Group of a node's rank among its siblings; later ones are in the last."""
DEPTHS = (0, 1, 2, 2, 3)
"""Group of a depth, from 1; deeper ones are in the last."""
WARM = (0.5, 0.8)
"""Bounds of the temperatures of drawn children."""
CLASSES = 2 + 1 + len(WARM)
"""Chosen children of greedy requests, of sampled ones, and drawn children by temperature."""
PRIOR, SHARED = 16.0, 8.0
"""Weight of the prior against other temperatures, in observations; of both against a cell's own."""
MEMORY = 1000.0
"""Observations of a cell after which an old one has weight 1/e."""
SETTLE_SHARE, SETTLE_MOST = 0.05, 128
"""New observations after which they take effect: as a share of all, and at most."""
LEAST, MOST = 1e-3, 0.995
"""Bounds of a chance."""
DRAWN = (0.5, 0.3, 0.2, 0.1)
"""Least prior of a drawn child by group of its rank: where the laws of draft and target overlap by half, half of the
first draws are accepted, however unlikely the token."""

BEYOND = np.iinfo(np.int64).max
"""Turn after that of every child."""

Shape = tuple[int, int, int, int]
SHAPE: Shape = (CLASSES, 1 + max(DEPTHS), 1 + max(RANKS), 1 + len(EDGES))


class AcceptanceTable:
    """P(accepted | reached) by class of the request, depth, rank among the siblings and conditional draft probability.

    A node is reached if its parent is accepted and its earlier siblings are not. A cell starts at what the draft says
    of itself, shares its observations with the same cell of other depths and temperatures until it has some of its
    own, and never falls with the conditional probability. Between the centres of two bins the chance is interpolated.
    It knows past steps only.
    """

    cells: ClassVar[int] = int(np.prod(SHAPE))

    def __init__(self) -> None:
        self.hits, self.trials, self.unsettled = np.zeros(SHAPE), np.zeros(SHAPE), 0
        self.prior = np.empty((CLASSES, *SHAPE[2:]))
        self.prior[:2] = CENTRES
        self.prior[2:] = np.maximum(CENTRES, np.array(DRAWN)[:, None])
        self.chance = torch.empty(SHAPE, dtype=torch.float32)
        """P(accepted | reached), [class, depth, rank, bin]."""
        self.edges, self.centres, self.warm = torch.tensor(EDGES), torch.tensor(CENTRES), torch.tensor(WARM)
        self.ranks = torch.tensor(RANKS)
        self.settle()

    def to(self, device: torch.device) -> None:
        """Move the tensors that a tree is grown with."""
        parts = (self.chance, self.edges, self.centres, self.warm, self.ranks)
        self.chance, self.edges, self.centres, self.warm, self.ranks = (part.to(device) for part in parts)

    def row(self, temperature: Tensor, greedy: Tensor, chosen: Tensor, depth: int) -> Tensor:
        """First cell of each request's part of the table, for nodes at `depth`: [R].

        Args:
            temperature: [R] of the draft.
            greedy, chosen: [R] bool.
        """
        drawn = 2 + torch.bucketize(temperature.contiguous(), self.warm)
        kind = torch.where(chosen, torch.where(greedy, 0, 1), drawn)
        return (kind * SHAPE[1] + depth_group(depth)) * (SHAPE[2] * SHAPE[3])

    def look_up(self, row: Tensor, conditional: Tensor) -> tuple[Tensor, Tensor]:
        """Cell of each node, and its chance to be accepted if it is reached: [R, W, K] each, K by rank.

        Args:
            row: [R] as `row` gives it.
            conditional: [R, W, K] conditional probability of each token.
        """
        rank = torch.arange(conditional.shape[2], device=conditional.device).clamp_(max=len(RANKS) - 1)
        place = torch.bucketize(conditional.contiguous(), self.edges, right=True)
        first = self.ranks[rank] * SHAPE[3] + row[:, None, None]
        left = (place - (conditional < self.centres[place]).long()).clamp_(0, len(CENTRES) - 2)
        low, high = self.centres[left], self.centres[left + 1]
        chance, at = self.chance.flatten(), first + left
        chance = torch.lerp(chance[at], chance[at + 1], ((conditional - low) / (high - low)).to(chance.dtype))
        return first + place, chance.clamp_(LEAST, MOST)

    def observe(self, cell: NDArray[np.int64], parent: NDArray[np.int64], nodes: NDArray[np.int64]) -> None:
        """Record R verified trees.

        Args:
            cell: [R, N], -1 where there is no node.
            parent: [R, N], -1 the root.
            nodes: [R, L] accepted path, -1 pads.
        """
        counts = np.zeros((2, self.cells), np.int64)
        parts = (np.ascontiguousarray(part, np.int64) for part in (cell, parent, nodes))
        self.unsettled += count(*parts, *counts)
        trials, hits = counts.reshape(2, *SHAPE)
        fade = np.exp(-trials / MEMORY)
        self.trials, self.hits = self.trials * fade + trials, self.hits * fade + hits
        if self.unsettled >= min(SETTLE_SHARE * self.trials.sum(), SETTLE_MOST):
            self.settle()

    def settle(self) -> None:
        """Let what has been observed take effect."""
        self.unsettled = 0
        hits, trials = self.hits.sum(1), self.trials.sum(1)  # of all depths
        prior = self.prior.copy()
        others = [part[2:].sum(0) - part[2:] for part in (hits, trials)]  # drawn at other temperatures
        prior[2:] = (others[0] + PRIOR * prior[2:]) / (others[1] + PRIOR)
        shared = rising((hits + SHARED * prior) / (trials + SHARED), trials + SHARED)[:, None]
        weight = self.trials + SHARED
        chance = rising((self.hits + SHARED * shared) / weight, weight)
        host = torch.from_numpy(chance.clip(LEAST, MOST).astype(np.float32))
        if self.chance.device.type != "cpu":
            host = host.pin_memory()  # else the copy waits for the device
        self.chance.copy_(host, non_blocking=True)

    def to_json(self) -> dict[str, Any]:
        return {"hits": short(self.hits.ravel().tolist()), "trials": short(self.trials.ravel().tolist())}

    def restore(self, data: Any) -> None:
        """Load the output of `to_json`. Raises ValueError, changing nothing, for other data."""
        hits, trials = (np.array(numbers(member(data, name), self.cells)).reshape(SHAPE) for name in ("hits", "trials"))
        if (hits > 1.001 * trials).any():  # numbers are written with six digits
            raise ValueError("more nodes were accepted than verified")
        self.hits, self.trials = hits, trials
        self.settle()


def depth_group(depth: int) -> int:
    return DEPTHS[min(depth, len(DEPTHS)) - 1]


@njit("int64(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[::1])")
def count(cell, parent, nodes, trials, hits):  # type: ignore[no-untyped-def]
    """Count the nodes that a verification has reached and accepted to `trials` and `hits` of their cells; returns the
    number of those reached. Arguments as of `AcceptanceTable.observe`.

    Siblings count in the order of their rank, then of their places: a learnt value, or a continuation of the text, may
    have moved a chosen child before a better one.
    """
    width, total = cell.shape[1], 0
    last = np.empty(1 + width, np.int64)  # turn of the last child tried of each; -1: it is not reached
    for r in range(len(cell)):
        last[:] = -1
        last[0] = BEYOND
        for at in nodes[r]:
            if at >= 0:
                last[1 + at] = BEYOND
        for at in nodes[r]:
            if at >= 0 and cell[r, at] >= 0:
                last[1 + parent[r, at]] = cell[r, at] // SHAPE[3] % SHAPE[2] * width + at
                hits[cell[r, at]] += 1
        for at in range(width):
            one = cell[r, at]
            if one >= 0 and one // SHAPE[3] % SHAPE[2] * width + at <= last[1 + parent[r, at]]:
                trials[one] += 1
                total += 1
    return total


def rising(value: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Isotonic regression along the last dimension; the weights are positive."""
    rows = -1, value.shape[-1]
    fitted: NDArray[np.float64] = pooled(*(np.ascontiguousarray(one).reshape(rows) for one in (value, weight)))
    return fitted.reshape(value.shape)


@njit("float64[:, ::1](float64[:, ::1], float64[:, ::1])")
def pooled(value, weight):  # type: ignore[no-untyped-def]
    """Pool adjacent violators in each row: [rows, bins]."""
    rows, bins = value.shape
    fitted = np.empty((rows, bins))
    mean, mass, end = np.empty(bins), np.empty(bins), np.empty(bins, np.int64)  # of the pools
    for r in range(rows):
        last = -1
        for at in range(bins):
            last += 1
            mean[last], mass[last], end[last] = value[r, at], weight[r, at], at + 1
            while last > 0 and mean[last - 1] >= mean[last]:
                both = mass[last - 1] + mass[last]
                mean[last - 1] = (mean[last - 1] * mass[last - 1] + mean[last] * mass[last]) / both
                mass[last - 1], end[last - 1] = both, at + 1
                last -= 1
        begin = 0
        for pool in range(last + 1):
            fitted[r, begin : end[pool]] = mean[pool]
            begin = end[pool]
    return fitted
