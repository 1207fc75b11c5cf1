"""Recorded trees: what a draft put on each node of every step, and how far the target went along."""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.policies import StepPlan

SCALE = 20.0
"""Stored values are exp(-byte / SCALE), from 1 down to 3e-6."""


class Grown(NamedTuple):
    """Trees [R, N] that were drafted under a plan, padded with depth 0."""

    value: NDArray[np.float64]
    depth: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    levels: NDArray[np.int64]  # [R]: draft forwards after the root's


class Recording:
    """T trees of up to W nodes, stream after stream, one stream a request."""

    def __init__(
        self,
        name: str,
        traits: Sequence[bool],
        greedy: Sequence[bool],
        trees: Sequence[Sequence[tuple[Sequence[int], Sequence[float], int]]],
    ):
        """
        Args:
            traits: whether children were sampled; whether values depend on sampled tokens, so that a budget counts
                nodes by their place; whether the method takes a floor and a threshold from the budget.
            greedy: of each stream.
            trees: of each stream and step the nodes' parents (-1: the root), the values that a budget is told, which
                never increase from a parent to its child, and the last accepted node (-1: none).
        """
        self.name = name
        self.sampled, self.by_place, self.priced = traits
        self.greedy, self.steps = list(greedy), [len(stream) for stream in trees]
        ends = np.cumsum(self.steps).tolist()
        spans = [range(end - steps, end) for end, steps in zip(ends, self.steps, strict=True)]
        self.streams = [
            [span for span, one in zip(spans, greedy, strict=True) if one == kind] for kind in (False, True)
        ]
        """The trees of each request that samples, and of each greedy one."""
        every = [tree for stream in trees for tree in stream]
        self.last = np.array([last for _, _, last in every])
        shape = len(every), max(len(parents) for parents, _, _ in every)
        self.value, self.parent, self.depth = np.zeros(shape), np.full(shape, -1), np.zeros(shape, np.int64)
        self.accepted, self.first_path = np.zeros(shape, bool), np.zeros(shape, bool)
        for row, (parents, values, node) in enumerate(every):
            self.value[row, : len(values)], self.parent[row, : len(values)] = values, parents
            depth = [0]  # of the root, which is the last element too
            for parent in parents:
                depth.insert(-1, 1 + depth[parent])
            self.depth[row, : len(values)] = depth[:-1]
            while node >= 0:
                self.accepted[row, node], node = True, parents[node]
            while node in parents[node + 1 :]:
                node = list(parents).index(node, node + 1)
                self.first_path[row, node] = True
        above = np.take_along_axis(self.value, np.maximum(self.parent, 0), 1)
        self.parent_value = np.where(self.parent < 0, 1.0, above)

    def __str__(self) -> str:
        each = f"{len(self.value)} trees, {self.accepted.sum(1).mean():.2f} nodes accepted of each"
        return f"{self.name}: {len(self.greedy)} requests, {each}"

    def save(self, file: Path) -> None:
        there = self.depth > 0
        stored = np.rint(-SCALE * np.log(np.maximum(self.value[there], 1e-9))).clip(0, 255).astype(np.uint8)
        np.savez_compressed(
            file,
            name=self.name,
            kind=np.array([self.sampled, self.by_place, self.priced]),
            greedy=np.array(self.greedy),
            steps=np.array(self.steps),
            nodes=there.sum(1).astype(np.uint8),
            value=np.diff(stored, prepend=np.uint8(0)),
            parent=(self.parent[there] + 1).astype(np.uint8),
            last=self.last.astype(np.int8),
        )

    @classmethod
    def load(cls, file: Path) -> Self:
        """Raises ValueError where `file` is no recording."""
        try:
            with np.load(file) as data:
                ends = np.cumsum(data["nodes"], dtype=int)[:-1]
                values = np.split(np.exp(np.cumsum(data["value"], dtype=np.uint8) / -SCALE), ends)
                parents = [one.tolist() for one in np.split(data["parent"].astype(int) - 1, ends)]
                trees = iter(zip(parents, values, data["last"].tolist(), strict=True))
                streams: Any = [[next(trees) for _ in range(count)] for count in data["steps"].tolist()]
                return cls(str(data["name"]), data["kind"].tolist(), data["greedy"].tolist(), streams)
        except (OSError, KeyError, ValueError, StopIteration) as error:
            raise ValueError(f"{str(file)!r} is no recording of trees: {error}") from error

    @cached_property
    def deepest(self) -> int:
        return int(self.depth.max())

    def grow(self, index: NDArray[np.int64], plan: StepPlan) -> Grown:
        """The trees `index` [R] as they would have been drafted under `plan`, by the nodes that were recorded."""
        value, depth = self.value[index], self.depth[index]
        there = depth > 0
        if self.priced:
            least = math.exp(plan.floor)
            there &= self.parent_value[index] > least
        if plan.chain:
            there &= self.first_path[index]
        limit = np.arange(1, 1 + min(1 + plan.levels, self.deepest))[:, None]
        within = there[:, None] & (depth[:, None] <= limit)  # [R, L, W]: what has been drafted down to each level
        within &= within.cumsum(-1) <= plan.nodes
        if self.priced:  # as OPT-Tree stops
            gain = np.diff((within * value[:, None]).sum(-1), prepend=0.0)
            more = (within & (depth[:, None] == limit) & (value[:, None] > least)).any(-1) & (gain > plan.threshold)
        else:
            more = (there[:, None] & (depth[:, None] == 1 + limit)).any(-1)
        more[:, -1] = False
        levels = more.argmin(1)
        kept = within[np.arange(len(index)), levels]
        order = np.argsort(~kept, axis=1, kind="stable")[:, : plan.nodes]
        value, depth, accepted = (
            np.take_along_axis(one * kept, order, 1) for one in (value, depth, self.accepted[index])
        )
        if self.by_place:
            value = (depth > 0) / np.arange(1, 1 + depth.shape[1])
        return Grown(value, depth, accepted, levels)


def bundled() -> list[Path]:
    """The recordings of this folder."""
    return sorted((Path(__file__).parent / "recorded").glob("*.npz"))
