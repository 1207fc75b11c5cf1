"""Interface of all drafts on Model Runner V1, and their timing."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.trees import SlicedMask


class V1Drafter(Protocol):
    """A `drafters.Drafter` that reads vLLM's batch. `runner`: that of this process, once it is complete."""

    runner: Any
    hidden_size: int | None
    """Width of the hidden states in its rows."""
    layers: Collection[str]
    """Attention layers of the draft, by their names in vLLM's static forward context."""

    def begin_cache(self, blocks: int) -> None:
        """Prepare for the KV cache, which now exists with so many blocks."""

    def forget(self, requests: Collection[str]) -> None:
        """Drop requests that have ended."""

    def pending(self, step: StepView, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        """Items that a step has for the draft. `accepted`: nodes of each tree, by row."""

    def to_read(self, pending: list[CatchUp], room: int, drafting: bool, states: Sequence[Tensor]) -> list[CatchUp]:
        """Items to read in this step, which is `drafting` or not; of what a model has skipped, at most `room` tokens.
        `states` as in `catch_up`."""

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """Read the tokens accepted since the last step, and the new roots.

        Args:
            states: the target's, [rows of the flat batch, H] each: its last, or its auxiliary layers'; None: zeros.
            mask: of the shape that all trees have, if it is known.

        Returns:
            the rows of the roots, in the order of their requests, and the state of their trees (None without roots).
        """

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]: ...

    def sample_state(self) -> Any:
        """State of one tree without a context, for measuring `grow`."""


class TimedDrafter:
    """Drafter whose forwards are timed as "draft" and subtracted from the surrounding "tree"."""

    def __init__(self, drafter: V1Drafter, clock: PhaseClock, hidden: list[Any]):
        self.drafter, self.clock, self.hidden = drafter, clock, hidden
        self.levels: list[tuple[int, float]] = []  # rows and seconds

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        before = self.clock.seconds["draft"]
        with self.clock.phase("draft"):
            result = self.drafter.grow(tokens, parent, state)
        seconds = self.clock.seconds["draft"] - before
        self.levels.append((int((tokens >= 0).sum()), seconds))
        self.clock.seconds["tree"] -= seconds
        if self.hidden:  # a recorder has put the root's there
            self.hidden.append(result[0].hidden)
        return result
