"""What a proposer is told between two steps, whichever model runner drafts."""

from typing import Any

from vllm_adaptive_tree.budget import Controller
from vllm_adaptive_tree.budget.reading import member, number
from vllm_adaptive_tree.proposers import Proposer, Steered


class Steering:
    """Thresholds that follow past steps. Host numbers, set before a step draws anything: whatever they are, no drawn
    token decides on its own tree, and the output keeps its law."""

    def __init__(self, proposer: Proposer, steered: Steered):
        self.proposer, self.steered = proposer, steered

    def price(self, controller: Controller, requests: int, trees: int) -> None:
        """Before a step of so many `requests`, of which so many draft `trees`."""
        if self.steered.price:
            self.proposer.threshold = controller.threshold(requests, trees)
            self.proposer.floor = controller.floor(requests)

    def grown(self, nodes: int, room: int) -> None:
        """A step's trees had so many `nodes` before any cut, of the `room` that they had; trees whose depth was limited
        say nothing."""
        if self.steered.fill and room:
            self.proposer.steer(nodes / room)

    def to_json(self) -> dict[str, float]:
        return {"threshold": self.proposer.threshold} if self.steered.fill else {}

    def restore(self, data: Any) -> None:
        """What `to_json` gave. Raises ValueError where `data` is something else."""
        if self.steered.fill:
            self.proposer.threshold = number(member(data, "threshold"), 0.0, 1.0)
