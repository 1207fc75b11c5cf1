"""Interface between a drafter, which only runs the draft, and a proposer, which decides what to expand.

Three kinds implement it, and a proposer does not know which one it has:

- autoregressive: an independent model, or a head that reads the target's hidden states. One forward per level; the
state holds, by slot, what a node passes to its children (hidden states, positions of its keys).
- one forward (`one_forward.py`): the logits of all levels are known before the first level is chosen, by depth alone or
  by depth and parent token.
- look-up (`lookup.py`): weighted continuations of the text, no model. These are registered by name (`TextDrafter`).

Nodes may share a distribution but never a draw: the children of each node are sampled with random numbers of their own.
If all parents of a level shared one draw, `traversal` would be biased (total variation 0.09 on a toy model).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from vllm_adaptive_tree.options import Options


class Frontier(NamedTuple):
    """The nodes that the draft reads next.

    `tokens` is -1 in an unused column. `parent` is a slot: slots number everything given to the drafter so far, 0 the
    root, then every column of every frontier in turn, unused ones included.

    The engine may trim trailing columns, so the nodes that matter most come first. A node whose column is trimmed is
    not read, and gets no children.
    """

    tokens: Tensor  # [R, W]
    parent: Tensor  # [R, W]


class Rows(NamedTuple):
    """The draft's output for one level of nodes.

    A row is dead if it defines no distribution: it contains NaN or +Inf, or is all -Inf. `draft_tree` finds such rows.
    The node of a dead row gets no children and counts as never read. A drafter with no prediction (a one-forward head
    below its last level, a look-up without a match) marks the row in `dead` itself; that is not counted as a fault.
    """

    logits: Tensor  # [R, W, V]; may be overwritten
    hidden: Tensor | None = None  # [R, W, H]: last hidden states, if the drafter has them
    dead: Tensor | None = (
        None  # [R, W] bool; always set when a proposer gets it, and the logits of dead rows are 0 then
    )
    scan: Any = None  # what the proposer's own `check` has found in them


class Drafter(Protocol):
    """Runs a draft. The adapter defines how it reads the accepted tokens, up to the roots."""

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Read one level of nodes, `tokens` and `parent` as in `Frontier`. Returns their rows and the new state."""
        ...


class Texts(NamedTuple):
    """The tokens of R requests so far, prompt and output."""

    requests: Sequence[str]
    """Names of the requests; a name may come again once it has been forgotten."""
    tokens: Tensor
    """Tokens [R, L] int64; arbitrary after a request's own length."""
    length: Tensor
    """Lengths [R] int64, at least 1. The last token is the root."""
    prompt: Tensor
    """Tokens of the prompt, [R] int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(Options):
    """Options of a draft that has none."""


class TextDrafter(ABC):
    """A draft without a checkpoint: it reads the tokens of each request. Users name it in `model`.

    On Model Runner V2 all tensors are on the device, and reading one on the host stalls the pipeline.
    """

    Options: ClassVar[type[Options]] = DraftOptions
    """A frozen dataclass: what users may set in `tree` for this draft, beside the options of the method."""
    requires: ClassVar[tuple[str, str] | None] = None
    """Module that must be there, and the remedy if it is not; checked before an engine starts."""
    compiled: ClassVar[str | None] = None
    """Import path of a class that drafts the same in compiled loops, on CPUs only."""
    fused: ClassVar[str | None] = None
    """Import path of a class, made by its `of(draft)`, whose `search` finds the same continuations by a kernel, on GPUs
    only, so that a CUDA graph may hold it."""
    chain_keys: ClassVar[dict[str, Any]] = {}
    """Further keys of vLLM's own speculation of its name, for comparisons."""

    @classmethod
    @abstractmethod
    def build(cls, options: Any, *, vocabulary: int) -> Self:
        """Make one from its `Options`; `vocabulary`: of the target, V.

        Raises:
            ValueError: a file named by the options is missing or invalid.
        """

    @abstractmethod
    def begin(self, texts: Texts) -> tuple[Rows, Any]:
        """Rows of the roots (W = 1), and the state of R trees."""

    @abstractmethod
    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Read one level, as in `Drafter`."""

    def forget(self, requests: Collection[str]) -> None:  # noqa: B027
        """Drop requests that have ended."""
