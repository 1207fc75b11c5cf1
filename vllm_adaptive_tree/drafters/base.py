"""The contract between a drafter, which only runs the draft, and a proposer, which decides what to expand.

Three kinds follow it, and a proposer does not know which one it has:

- autoregressive: an independent model, or a head that reads the target's hidden states. One forward a level; what a
  node hands on to its children (hidden states, places of its keys) is the state, by slot.
- one forward (`one_forward.py`): all levels' rows are there before the first level is chosen, by depth alone or by
  depth and parent token.
- look-up (`lookup.py`): weighted continuations of the text in place of a model.

Nodes may share a distribution but never a draw: the children of each node are sampled with random numbers of their own.
If all parents of a level shared one draw, `traversal` would be biased (total variation 0.09 on a toy model).
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Frontier(NamedTuple):
    """The nodes that the draft shall read next.

    `tokens` is -1 where a request has no node; the engine may cut off columns at the end that nobody uses. `parent`
    counts the slots given to the drafter so far: 0 is the root, then every slot of every frontier in turn, the unused
    ones included.
    """

    tokens: Tensor  # [R, W]
    parent: Tensor  # [R, W]


class Rows(NamedTuple):
    """What the draft said of one level of nodes.

    A row is dead if it gives no law: it holds NaN or +Inf, or -Inf throughout. `draft_tree` finds such rows. Behind a
    dead row nothing is revealed: the node gets no children, and counts as never read. A drafter that has nothing more
    to say (a one-forward head below its last level, a look-up without a match) says so itself in `dead`; that is no
    fault, and is not counted as one.
    """

    logits: Tensor  # [R, W, V]; a drafter's may be written to
    hidden: Tensor | None = None  # [R, W, H]: its last hidden states, from a drafter that has them
    dead: Tensor | None = None  # [R, W] bool; a proposer always has it, and the logits of such a row are all 0 then


class Drafter(Protocol):
    """How it reads what was accepted, up to the roots, is the adapter's affair."""

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Read one level of nodes, `tokens` and `parent` as in `Frontier`. Returns its rows and the state."""
        ...
