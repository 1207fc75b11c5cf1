"""The contract between a proposer, which decides what to expand, and a drafter, which only runs the draft model."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from vllm_adaptive_tree.trees import TreeBatch


class Frontier(NamedTuple):
    """The nodes that the draft model shall read next.

    Each request's nodes are packed to the left; `tokens` is -1 behind them, so the engine may cut the width down to the
    widest request. `parent` counts the slots given to the drafter so far: 0 is the root, then every slot of every
    frontier in turn, the unused ones included.
    """

    tokens: Tensor  # [R, W]
    parent: Tensor  # [R, W]


class Drafter(Protocol):
    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Tensor, Any]:
        """Read the tokens accepted since the last call. Returns the root's logits [R, V] and an opaque state."""
        ...

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one level of nodes, `tokens` and `parent` as in `Frontier`. Returns logits [R, W, V] and the state."""
        ...


class Proposer(Protocol):
    """Grows R trees level by level; `growth` is the proposer's own record and never read by others."""

    max_depth: int

    def begin(self, logits: Tensor, *, nodes: int, temperature: Tensor) -> Any:
        """Layer 1 from the root's logits [R, V]; at most `nodes` nodes a tree; `temperature` [R] shapes the law."""
        ...

    def growing(self, growth: Any) -> Tensor:
        """Which trees want another level: bool [R]."""
        ...

    def frontier(self, growth: Any) -> Frontier:
        """The nodes whose children decide the next level."""
        ...

    def extend(self, growth: Any, logits: Tensor) -> Any:
        """Add the level below the frontier, from its logits [R, W, V]; trees that are not growing stay as they are."""
        ...

    def finish(self, growth: Any) -> TreeBatch: ...


def draft_tree(
    proposer: Proposer,
    drafter: Drafter,
    logits: Tensor,
    state: Any,
    *,
    nodes: int,
    temperature: Tensor,
    agree: Callable[[Frontier, Tensor], tuple[Frontier, bool]] = lambda frontier, growing: (frontier, True),
) -> TreeBatch:
    """Grow one tree per request from the root's logits [R, V].

    `agree` may read `growing` [R] to end the growth early, may cut the frontier's unused width, and makes every rank
    read the same frontier.
    """
    growth = proposer.begin(logits, nodes=nodes, temperature=temperature)
    for _ in range(proposer.max_depth - 1):
        frontier, more = agree(proposer.frontier(growth), proposer.growing(growth))
        if not more:
            break
        logits, state = drafter.grow(frontier.tokens, frontier.parent, state)
        growth = proposer.extend(growth, logits)
    return proposer.finish(growth)
