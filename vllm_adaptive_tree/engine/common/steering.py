"""What a proposer is told between two steps, whichever model runner drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_adaptive_tree.budget.reading import member, number
from vllm_adaptive_tree.proposers import Proposer, Steered


class Steering:
    """Thresholds that follow past steps. Host numbers, set before a step samples anything: whatever they are, no
    sampled token decides on its own tree, and the output keeps its distribution."""

    def __init__(self, proposer: Proposer, steered: Steered):
        self.proposer, self.steered = proposer, steered

    def price(self, threshold: float, floor: float) -> None:
        """Before a step.

        Args:
            threshold: what a level has to add to the expected acceptance of a tree, in tokens: mu times the best rate
                in OPT-Tree's terms (arXiv 2406.17276).
            floor: log value up to which a node is not expanded.
        """
        if self.steered.price:
            self.proposer.threshold, self.proposer.floor = threshold, floor

    def grown(self, nodes: int, room: int) -> None:
        """A step's trees had so many `nodes` before any cut, of the `room` that they had; trees whose depth was limited
        say nothing."""
        if self.steered.fill and room:
            self.proposer.steer(nodes / room)

    @contextmanager
    def reading(self, limits: Any) -> Iterator[None]:
        """Inside, the proposer compares with `limits` [2] on the device, threshold and floor: a CUDA graph would keep
        the numbers of its recording."""
        proposer: Any = self.proposer
        numbers = proposer.threshold, proposer.floor
        proposer.threshold, proposer.floor = limits.unbind()
        try:
            yield
        finally:
            proposer.threshold, proposer.floor = numbers

    def to_json(self) -> dict[str, float]:
        return {"threshold": self.proposer.threshold} if self.steered.fill else {}

    def restore(self, data: Any) -> None:
        """What `to_json` gave. Raises ValueError where `data` is something else."""
        if self.steered.fill:
            self.proposer.threshold = number(member(data, "threshold"), 0.0, 1.0)
