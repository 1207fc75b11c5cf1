"""Interface of proposers, and growing trees with a proposer and a drafter."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.drafters import Drafter, Frontier, Rows
from vllm_adaptive_tree.proposers.acceptance_table import AcceptanceTable
from vllm_adaptive_tree.proposers.options import MethodOptions
from vllm_adaptive_tree.registry import imported
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import SlicedMask, TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

KEYS_PER_LEVEL = 1 << 32


class Proposal(NamedTuple):
    """R finished trees, with the data that an acceptance rule needs about the drawing of their nodes."""

    tree: TreeBatch
    read: Tensor  # [R, N]: the drafter's slot of each node, as in `Frontier`; -1: never read, or a dead row
    num_planned: Tensor  # [R, N + 1]: number of children planned for the root (first) and each node
    cell: Tensor | None = None  # [R, N]: cell of an acceptance table in which a node counts; -1: none
    chosen: Tensor | None = None  # [R, N] bool: nodes that a look-up has chosen; None: there is no look-up

    def padded(self, nodes: int) -> "Proposal":
        """Proposal with N = `nodes`, for callers that need a fixed width: a fixed shape may have fewer nodes."""
        more = (0, nodes - self.read.shape[1])
        cell = None if self.cell is None else pad(self.cell, more, value=-1)
        chosen = None if self.chosen is None else pad(self.chosen, more)
        read, planned = pad(self.read, more, value=-1), pad(self.num_planned, more)
        return Proposal(self.tree.padded(nodes), read, planned, cell, chosen)

    def first(self, requests: int) -> "Proposal":
        """Proposal of the first trees."""
        tree = TreeBatch(*(part[:requests] for part in self.tree))
        cell, chosen = (None if part is None else part[:requests] for part in (self.cell, self.chosen))
        return Proposal(tree, self.read[:requests], self.num_planned[:requests], cell, chosen)

    def cut(self, limit: Tensor) -> "Proposal":
        """Proposal of the first `limit[r]` nodes of every tree ([R]), as if the scheduler had kept no others."""
        return self._replace(tree=self.tree.cut(limit))

    @classmethod
    def nothing(cls, requests: int, nodes: int, device: torch.device) -> Self:
        """Trees without a node, in so many slots."""
        tree = TreeBatch.empty(requests, nodes, device)
        return cls(tree, tree.parent, torch.zeros(requests, 1 + nodes, dtype=torch.int64, device=device))


class Request(NamedTuple):
    """Requests for which trees are grown; R entries each."""

    temperature: Tensor  # [R]: children are shaped by or sampled from q = softmax(logits / temperature)
    greedy: Tensor  # [R] bool: the target takes its argmax, so top-k children beat sampled ones
    rng: RandomSource
    initial: Tensor | None = None
    """[R, W] first-layer tokens sampled by the target itself (-1: none), for proposers that use them."""
    chosen: Tensor | None = None
    """[R] bool: verified by the target's own draws, so any children are lossless; None: the `greedy` ones."""


class Proposer(ABC):
    """Grows R trees level by level; `growth` is the proposer's own state, opaque to everyone else.

    A method is one subclass with its `Options` and `build`. Everything that the engine needs to know about a method is
    an attribute here; it never checks the class.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    """A frozen dataclass: the options users may set in `tree`."""
    max_depth: int
    kinds: tuple[Kind, ...]
    """Kinds of children it can produce, in order of preference."""
    kind: Kind
    """Kind to produce; one of `kinds`, at first the first."""
    max_children: int
    """Upper bound of the children of a node."""
    max_nodes: int | None = None
    """Upper bound of the nodes of a tree, if the method has one of its own."""
    hidden_size: int | None = None
    """Width of the draft's hidden states, if it reads them; a draft model of another width is refused."""
    compiled: ClassVar[str | None] = None
    """Import path of a class that grows the same trees in compiled loops; made by its `of(proposer)`, on CPUs only."""
    fused: ClassVar[str | None] = None
    """Import path of a class that grows the same trees by kernels, made in the same way, on GPUs only."""
    threshold: float = 0.0
    floor: float = -math.inf
    """Set by the engine if `Options.steered` says so. `threshold`: tokens that a level must gain, or the smallest value
    of a slot. `floor`: nodes up to this log value are not expanded. While a tree of a `capturable` proposer grows on a
    device, both are scalar tensors."""
    gate: nn.Module | None = None
    """Model that is evaluated while a tree grows; the engine moves it to the draft's device."""
    acceptance: AcceptanceTable | None = None
    """Table of past acceptance by which it values nodes; the engine keeps it up to date."""
    either: ClassVar[bool] = False
    """True if the children of each request may be chosen or drawn, by `Request.chosen`."""
    by_value: ClassVar[bool] = False
    """True if a tree is the nodes of the largest value, so that of a look-up's continuations the best are the tree."""
    capturable: ClassVar[bool] = False
    """True if the work of growing a tree follows from shapes alone, so that a CUDA graph may hold it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kinds" in vars(cls):
            cls.kind = vars(cls).get("kind", cls.kinds[0])

    @classmethod
    @abstractmethod
    def build(cls, options: Any, *, nodes: int) -> Self:
        """Make a proposer from its `Options`; `nodes`: the node budget per request.

        Raises:
            ValueError: a file named by the options is missing or invalid.
        """

    def for_cpu(self) -> "Proposer":
        """Itself, or its `compiled` version. Not inherited: a subclass may grow other trees."""
        return self._made(vars(type(self)).get("compiled"))

    def for_gpu(self) -> "Proposer":
        """Itself, or its `fused` version, in the same way."""
        return self._made(vars(type(self)).get("fused"))

    def _made(self, path: str | None) -> "Proposer":
        if path is None:
            return self
        proposer: Proposer = imported(path).of(self)
        return proposer

    def mask(self, nodes: int) -> SlicedMask | None:
        """Tree mask of the draft, if it is known before a tree of up to `nodes` nodes is drawn."""
        return None

    @property
    def children(self) -> str:
        """The children that it drafts, in words."""
        return f"{self.kind} children"

    def chooses(self, temperature: float) -> bool:
        """True if the children of a request of this temperature are chosen, so that it walks with the target's own
        draws, whatever the rule of the pair."""
        return False

    @property
    def by_place(self) -> bool:
        """True if a budget must value nodes by their position in the tree alone.

        So it is if the node weights depend on sampled tokens: a sampled token must not influence its own pruning.
        """
        return False

    def steer(self, fill: float) -> None:
        """Adjust the threshold, if `Options.steered.fill`: a step's trees, before pruning, filled this fraction of
        their budget."""
        raise AssertionError(f"{type(self).__name__} has no threshold to steer")

    def check(self, rows: Rows, temperature: Tensor, used: Tensor | None = None) -> tuple[Rows, Tensor]:
        """Find the dead rows of a level, and set their logits to 0 in place; called before `begin` and `extend`.

        Args:
            temperature: [R].
            used: [R, W] bool: columns with a node; None: all.

        Returns:
            The rows, and the dead ones that the drafter had not marked [R, W].
        """
        logits = rows.logits
        peak = logits.amax(-1) / temperature[:, None]  # propagates NaN
        broken = peak - peak != 0  # not finite, in two operations
        dead = broken
        if rows.dead is not None:
            dead, broken = broken | rows.dead, broken & ~rows.dead
        # On a CPU the test is free, and an empty masked_fill costs as much as a softmax over all rows.
        if dead.device.type != "cpu" or dead.numpy().any():
            logits.masked_fill_(dead[..., None], 0.0)
        return rows._replace(dead=dead), broken

    @abstractmethod
    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Any:
        """Grow depth 1 from the roots' rows (W = 1), at most `nodes` nodes per tree. Dead rows never get children."""

    @abstractmethod
    def growing(self, growth: Any) -> Tensor:
        """Trees that want another level: [R] bool."""

    @abstractmethod
    def frontier(self, growth: Any) -> Frontier:
        """Nodes to read for the next level."""

    @abstractmethod
    def extend(self, growth: Any, rows: Rows) -> Any:
        """Add the level below the frontier, from its rows; trees that are not growing stay unchanged."""

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

    Args:
        agree: may inspect `growing` [R] to stop early, trims trailing columns of the frontier, and makes every rank
            read the same frontier. The number of used columns that it trims must not depend on a sampled token.
        keep: called with the logits [R, W, V] of every level, the root's first; 0 in dead rows.
        lost: called with the nodes [R, W] bool whose row was dead though the drafter had not marked it.
    """
    rows, broken = proposer.check(rows, request.temperature)
    lost(broken)
    keep(rows.logits)
    growth = proposer.begin(rows, nodes=nodes, request=request)
    for _ in range(proposer.max_depth - 1):
        frontier, more = agree(proposer.frontier(growth), proposer.growing(growth))
        if not more or frontier.tokens.shape[1] == 0:
            break
        rows, state = drafter.grow(frontier.tokens, frontier.parent, state)
        used = frontier.tokens != EMPTY
        rows, broken = proposer.check(rows, request.temperature, used)
        lost(broken & used)
        keep(rows.logits)
        growth = proposer.extend(growth, rows)
    return proposer.finish(growth)


def rng_keys(level: int, logits: Tensor) -> Tensor:
    """Keys [R, W] for `rng.fold_in` at a frontier with logits [R, W, V]: the request's own level and column, so neither
    the rest of the batch nor trimmed columns change its draws."""
    requests, width, _ = logits.shape
    return (level * KEYS_PER_LEVEL + torch.arange(width, device=logits.device)).expand(requests, width)


def softmax_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature); arguments as for `log_softmax_at`."""
    scaled = _scaled(logits, temperature)
    return torch.softmax(scaled, -1, out=scaled)


def log_softmax_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) in at least float32; `temperature` has no last dimension."""
    scaled = _scaled(logits, temperature)
    return torch.log_softmax(scaled, -1, out=scaled)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature in a tensor the softmax may overwrite: allocating such rows costs more than the softmax."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide / temperature[..., None] if wide is logits else wide.div_(temperature[..., None])
