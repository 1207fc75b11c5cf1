"""Controller of a proposer's thresholds between steps, for both model runners."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_adaptive_tree.json_numbers import member, number
from vllm_adaptive_tree.proposers import Proposer, Steered


class ThresholdController:
    """Adjusts a proposer's thresholds to past steps. They are host numbers, set before a step samples anything: no
    sampled token influences its own tree, and the output keeps its distribution."""

    def __init__(self, proposer: Proposer, steered: Steered):
        self.proposer, self.steered = proposer, steered

    def price(self, threshold: float, floor: float) -> None:
        """Set the thresholds of a step.

        Args:
            threshold: what a level has to add to the expected acceptance of a tree, in tokens: mu times the best rate
                in OPT-Tree's terms (arXiv 2406.17276).
            floor: log value up to which a node is not expanded.
        """
        if self.steered.price:
            self.proposer.threshold, self.proposer.floor = threshold, floor

    def grown(self, nodes: int, room: int) -> None:
        """Adjust the threshold after a step whose trees had so many `nodes` before any cut, of the `room` that they
        had; not called for trees whose depth was limited."""
        if self.steered.fill and room:
            self.proposer.steer(nodes / room)

    @contextmanager
    def reading(self, limits: Any) -> Iterator[None]:
        """Let the proposer compare with `limits` [2] on the device, threshold and floor, inside the block: a CUDA graph
        would keep the numbers of its recording."""
        proposer: Any = self.proposer
        numbers = proposer.threshold, proposer.floor
        proposer.threshold, proposer.floor = limits.unbind()
        try:
            yield
        finally:
            proposer.threshold, proposer.floor = numbers

    def to_json(self) -> dict[str, Any]:
        table = self.proposer.acceptance
        learnt = {} if table is None else {"acceptance": table.to_json()}
        return {**learnt, "threshold": self.proposer.threshold} if self.steered.fill else learnt

    def restore(self, data: Any) -> None:
        """Restore the data that `to_json` gave. Raises ValueError, changing nothing, where `data` is something else."""
        threshold = number(member(data, "threshold"), 0.0, 1.0) if self.steered.fill else self.proposer.threshold
        if self.proposer.acceptance is not None:
            self.proposer.acceptance.restore(member(data, "acceptance"))
        self.proposer.threshold = threshold
