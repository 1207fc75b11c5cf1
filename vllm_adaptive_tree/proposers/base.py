"""A proposer, which decides what to expand, and how it grows trees with a drafter."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.drafters import Drafter, Frontier, Rows
from vllm_adaptive_tree.proposers.options import MethodOptions
from vllm_adaptive_tree.registry import imported
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import SlicedMask, TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

MOST_COLUMNS = 1 << 32


class Proposal(NamedTuple):
    """R finished trees, and what an acceptance rule has to know of how their nodes were drawn."""

    tree: TreeBatch
    read: Tensor  # [R, N]: the drafter's number of each node, counted as in `Frontier`; -1: never read, or a dead row
    drawn: Tensor  # [R, N + 1]: how many children the root (first) and each node were to get

    def padded(self, nodes: int) -> "Proposal":
        """The same with N = `nodes`, for those who need one width: a fixed shape may have fewer."""
        more = (0, nodes - self.read.shape[1])
        return Proposal(self.tree.padded(nodes), pad(self.read, more, value=-1), pad(self.drawn, more))


class Request(NamedTuple):
    """What a tree is grown for; R entries each."""

    temperature: Tensor  # [R]: the law q that shapes or draws the children is softmax(logits / temperature)
    greedy: Tensor  # [R] bool: the target takes its argmax, so the best children serve better than sampled ones
    rng: RandomSource
    initial: Tensor | None = None
    """[R, W] first-layer tokens that the target drew itself (-1: none), for the proposers that take them."""

    @property
    def noise(self) -> RandomSource:
        """The name of release 0.1 for `rng`."""
        return self.rng


class Proposer(ABC):
    """Grows R trees level by level; `growth` is the proposer's own record and never read by others.

    A method is one subclass with its `Options` and `build`. What else the engine has to know of it, it asks here, never
    by its class.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    """A frozen dataclass: what users may write into `tree`."""
    max_depth: int
    kinds: tuple[Kind, ...]
    """Kinds of children that it can produce, in order of preference."""
    kind: Kind
    """The one that it shall produce; one of `kinds`."""
    most_children: int
    """The most children of a node."""
    most_nodes: int | None = None
    """The most nodes of a tree, where the method has a limit of its own."""
    hidden_size: int | None = None
    """Width of the draft's hidden states, where it reads them; an engine with others is refused."""
    compiled: ClassVar[str | None] = None
    """Path of a class that grows the same trees in compiled loops and is made by `of(proposer)`; imported on CPUs."""
    threshold: float = 0.0
    floor: float = -math.inf
    """Both are set by the engine where `Options.steered` says so: tokens that a level has to bring, or the least value
    of a slot; and the log value up to which a node is not worth expanding."""

    @classmethod
    @abstractmethod
    def build(cls, options: Any, *, nodes: int) -> Self:
        """From its `Options`; `nodes`: the node budget of a request.

        Raises:
            ValueError: a file that the options name is missing or holds something else.
        """

    def on_host(self) -> "Proposer":
        """Itself, or one that grows the same trees sooner on a CPU. A subclass may grow others, so it inherits none."""
        path = vars(type(self)).get("compiled")
        if path is None:
            return self
        proposer: Proposer = imported(path).of(self)
        return proposer

    def mask(self, nodes: int) -> SlicedMask | None:
        """The tree mask of the draft's reading, where it is known before a tree of so many `nodes` is drawn."""
        return None

    @property
    def by_place(self) -> bool:
        """Whether a budget has to value nodes by their place in the tree alone: its weights then depend on the tokens
        that were drawn, and a drawn token must not decide on its own cut."""
        return False

    def steer(self, fill: float) -> None:
        """Where `Options.steered.fill` is set: a step's trees, before any cut, filled this share of their budget."""
        raise AssertionError(f"{type(self).__name__} has no threshold that is steered")

    @abstractmethod
    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Any:
        """Layer 1 from the roots' rows (W = 1); at most `nodes` nodes a tree. None below a dead row, here and later."""

    @abstractmethod
    def growing(self, growth: Any) -> Tensor:
        """Which trees want another level: bool [R]."""

    @abstractmethod
    def frontier(self, growth: Any) -> Frontier:
        """The nodes whose children decide the next level."""

    @abstractmethod
    def extend(self, growth: Any, rows: Rows) -> Any:
        """Add the level below the frontier, from its rows; trees that are not growing stay as they are."""

    @abstractmethod
    def finish(self, growth: Any) -> Proposal: ...


def draft_tree(
    proposer: Proposer,
    drafter: Drafter,
    rows: Rows,
    state: Any,
    *,
    nodes: int,
    request: Request,
    agree: Callable[[Frontier, Tensor], tuple[Frontier, bool]] = lambda frontier, growing: (frontier, True),
    keep: Callable[[Tensor], None] = lambda logits: None,
    lost: Callable[[Tensor], None] = lambda dead: None,
) -> Proposal:
    """Grow one tree per request from the roots' rows (W = 1).

    `agree` may read `growing` [R] to end the growth early, may cut the frontier's unused columns, and makes every rank
    read the same frontier. `keep` is given the logits [R, W, V] of every level, the root's first, 0 in dead rows;
    `lost` which nodes [R, W] bool had a dead row that the
    drafter had not expected.
    """
    rows, broken = _finite(rows, request.temperature)
    lost(broken)
    keep(rows.logits)
    growth = proposer.begin(rows, nodes=nodes, request=request)
    for _ in range(proposer.max_depth - 1):
        frontier, more = agree(proposer.frontier(growth), proposer.growing(growth))
        if not more or frontier.tokens.shape[1] == 0:
            break
        rows, state = drafter.grow(frontier.tokens, frontier.parent, state)
        rows, broken = _finite(rows, request.temperature)
        lost(broken & (frontier.tokens != EMPTY))
        keep(rows.logits)
        growth = proposer.extend(growth, rows)
    return proposer.finish(growth)


def _finite(rows: Rows, temperature: Tensor) -> tuple[Rows, Tensor]:
    """The rows, the logits of dead ones 0 in place, and which are dead though the drafter did not say so [R, W];
    `temperature` [R]."""
    logits = rows.logits
    broken = (logits.amax(-1) / temperature[:, None]).isfinite().logical_not_()  # NaN anywhere is the maximum
    dead = broken
    if rows.dead is not None:
        dead, broken = broken | rows.dead, broken & ~rows.dead
    # On a CPU a look costs nothing, and writing to no row as much as a softmax of all.
    if dead.device.type != "cpu" or dead.numpy().any():
        logits.masked_fill_(dead[..., None], 0.0)
    return rows._replace(dead=dead), broken


def places(level: int, logits: Tensor) -> Tensor:
    """Keys [R, W] for `rng.fold_in` at a frontier with logits [R, W, V]: the request's own level and column, so neither
    the rest of the batch nor trimmed columns change its draws."""
    requests, width, _ = logits.shape
    return (level * MOST_COLUMNS + torch.arange(width, device=logits.device)).expand(requests, width)


def law(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature), as `log_law`."""
    scaled = _scaled(logits, temperature)
    return torch.softmax(scaled, -1, out=scaled)


def log_law(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) in at least float32; `temperature` lacks the last dimension."""
    scaled = _scaled(logits, temperature)
    return torch.log_softmax(scaled, -1, out=scaled)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """A tensor that the softmax may overwrite: fresh memory for rows this long costs more than the softmax."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide / temperature[..., None] if wide is logits else wide.div_(temperature[..., None])
