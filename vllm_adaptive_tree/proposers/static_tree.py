"""A tree of one shape, its children chosen or drawn in any way (EAGLE-1, Medusa, MCSD, SpecInfer, SpecHub)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers.base import Proposal, Proposer, Request, law, places
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.proposers.options import MethodOptions, is_int, option
from vllm_adaptive_tree.trees import Shape, SlicedMask, TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

SHAPES = ("eagle1", "binary", "ternary")
CHILDREN: dict[str, Kind] = {"top_k": "one_hot", "without_replacement": "without_replacement", "iid": "iid"}
"""What users call a kind of children -> the kind."""


def is_k_config(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(is_int(k) and k >= 1 for k in value)


def _is_shape(value: Any) -> bool:
    if is_k_config(value):
        return True
    rows = isinstance(value, list | tuple) and bool(value) and all(isinstance(path, list | tuple) for path in value)
    if not rows or not all(is_int(rank) and rank >= 0 for path in value for rank in path):
        return False
    Shape.of(value)  # says itself what is wrong with it
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedOptions(MethodOptions):
    """A method whose shape is fixed and whose children may come about in several ways."""

    children: str | None = option(
        None, lambda value: value is None or value in tuple(CHILDREN), f"one of {', '.join(map(repr, CHILDREN))}"
    )
    """How the children of a node come about; None: as the acceptance rule needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTreeOptions(ShapedOptions):
    shape: Any = option(
        "eagle1",
        lambda value: value in SHAPES if isinstance(value, str) else _is_shape(value),
        "'eagle1', 'binary', 'ternary', a k-config as [4, 2, 2, 1], or rank paths as [[0], [1], [0, 0]]",
    )


class Level(NamedTuple):
    """The inner nodes of one level of a shape, and the slots of their children; slot 0 is the root."""

    inner: Tensor  # [W] slots
    above: Tensor  # [W] slots of their parents
    fanout: Tensor  # [W]
    most: int  # the largest fan-out
    children: Tensor  # [C] slots
    column: Tensor  # [C]: which inner node is the parent
    rank: Tensor  # [C]


class Plan(NamedTuple):
    """A shape as tensors, made once per shape and device."""

    levels: list[Level]
    parent: Tensor  # [N]
    depth: Tensor  # [N]
    fanout: Tensor  # [1 + N], the root first


class Growth(NamedTuple):
    tokens: Tensor  # [R, 1 + N], the root first
    path: Tensor  # [R, 1 + N] log path probability
    read: Tensor  # [R, 1 + N]
    going: Tensor  # [R] bool
    level: int
    numbers: int
    plan: Plan
    request: Request


class StaticTree(Proposer):
    """`shape` cut to the node budget; the children by `kind`. Greedy requests get each node's best tokens."""

    Options: ClassVar[type[MethodOptions]] = StaticTreeOptions
    kinds: tuple[Kind, ...] = ("without_replacement", "one_hot", "iid", "hub_pair", "top_k_plus_one")

    def __init__(self, shape: Shape, *, kind: Kind = "without_replacement"):
        self.shape, self.kind = shape, kind
        self.max_depth, self.most_children, self.most_nodes = shape.depth, shape.max_children, len(shape)

    @classmethod
    def build(cls, options: Any, *, nodes: int) -> Self:
        return cls(_shape(options.shape, nodes)).of_children(options)

    def of_children(self, options: ShapedOptions) -> Self:
        """The same with the children that the options name, if they do."""
        if options.children is not None:
            self.kinds = (CHILDREN[options.children],)
        return self

    @property
    def by_place(self) -> bool:
        return self.kind != "one_hot"

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        shape = self.shape.cut(nodes)
        logits = rows.logits
        minus = torch.full((len(logits), 1 + len(shape)), -1, device=logits.device)
        path = torch.zeros_like(law(logits[:, :, 0], request.temperature)).expand(minus.shape).contiguous()
        going = torch.ones_like(minus[:, 0], dtype=torch.bool)
        growth = Growth(minus, path, minus, going, 0, 0, _plan(shape, logits.device), request)
        return self.extend(growth, rows)

    def mask(self, nodes: int) -> SlicedMask:
        return SlicedMask.cached(self.shape.cut(nodes))

    def growing(self, growth: Growth) -> Tensor:
        return growth.going & (growth.level < len(growth.plan.levels))

    def frontier(self, growth: Growth) -> Frontier:
        if growth.level >= len(growth.plan.levels):
            return Frontier(growth.tokens[:, :0], growth.read[:, :0])
        level = growth.plan.levels[growth.level]
        tokens = growth.tokens.index_select(1, level.inner).masked_fill(~growth.going[:, None], EMPTY)
        return Frontier(tokens, growth.read.index_select(1, level.above).clamp(min=0))

    def extend(self, growth: Growth, rows: Rows) -> Growth:
        level, request, logits = growth.plan.levels[growth.level], growth.request, rows.logits
        width = logits.shape[1]
        inner = level.inner[:width]
        number = growth.numbers + torch.arange(width, device=logits.device).expand(len(logits), width)
        given = _given(request.initial, growth)
        assert rows.dead is not None
        there = growth.going[:, None] & (~rows.dead | given[:, None])
        if growth.level:
            there = there & (growth.tokens.index_select(1, inner) != EMPTY)
        q = law(logits, request.temperature[:, None])  # [R, W, V]
        fanout = level.fanout[:width].expand(number.shape)
        rng = request.rng.fold_in(places(growth.level, logits))
        drawn = draw_children(self.kind, q, fanout, level.most, rng, request.greedy)  # [R, W, K]
        if request.initial is not None and growth.level == 0:
            drawn = torch.where(given[:, None, None], request.initial[:, None, : drawn.shape[2]], drawn)
        drawn = drawn.masked_fill(~there[:, :, None], EMPTY)
        below = q.gather(2, drawn.clamp(min=0)).log() + growth.path.index_select(1, inner)[:, :, None]
        # columns that were cut off, and children that a small vocabulary lacks, stay empty
        missing = (0, level.most - drawn.shape[2], 0, len(level.inner) - width)
        drawn, below = torch.nn.functional.pad(drawn, missing, value=EMPTY), torch.nn.functional.pad(below, missing)
        place = level.column * level.most + level.rank  # [C] in [W * K]
        return growth._replace(
            tokens=growth.tokens.index_copy(1, level.children, drawn.flatten(1).index_select(1, place)),
            path=growth.path.index_copy(1, level.children, below.flatten(1).index_select(1, place)),
            read=growth.read.index_copy(1, inner, torch.where(there, number, -1)),
            going=growth.going & (self.goes_on(q, rows.hidden, there) | given),
            level=growth.level + 1,
            numbers=growth.numbers + width,
        )

    def goes_on(self, q: Tensor, hidden: Tensor | None, used: Tensor) -> Tensor:
        """Whether the trees [R] bool shall have a level below the one just drawn from the laws q [R, W, V]; `used`
        [R, W] bool: the nodes behind which it was drawn."""
        return torch.ones_like(used[:, 0])

    def finish(self, growth: Growth) -> Proposal:
        tokens, path, read = growth.tokens[:, 1:], growth.path[:, 1:], growth.read[:, 1:]
        _, parent, depth, fanout = growth.plan
        drawn = torch.where(growth.read >= 0, fanout, 0)
        parent, depth = parent.expand_as(tokens), depth.expand_as(tokens)
        # nodes to the left, in their order
        order = (tokens == EMPTY).int().sort(dim=1, stable=True).indices
        place = order.argsort(dim=1)
        parent = torch.where(parent < 0, -1, place.gather(1, parent.clamp(min=0))).gather(1, order)
        tokens, read = tokens.gather(1, order), read.gather(1, order)
        gone = tokens == EMPTY
        tree = TreeBatch(
            tokens,
            parent.masked_fill(gone, -1),
            depth.gather(1, order).masked_fill(gone, 0),
            path.gather(1, order).masked_fill(gone, -torch.inf),
        )
        return Proposal(tree, read, torch.cat([drawn[:, :1], drawn[:, 1:].gather(1, order)], 1))


def _shape(shape: Any, nodes: int) -> Shape:
    if isinstance(shape, str):
        return Shape.named(shape, nodes).cut(nodes)
    return Shape.k_config(shape, nodes) if isinstance(shape[0], int) else Shape.of(shape).cut(nodes)


def _given(initial: Tensor | None, growth: Growth) -> Tensor:
    """The trees [R] bool whose next level is the target's own."""
    if initial is None or growth.level > 0:
        return torch.zeros_like(growth.going)
    return (initial >= 0).any(1)


@lru_cache(maxsize=64)
def _plan(shape: Shape, device: torch.device) -> Plan:
    def column(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)

    slots = {(): 0, **{path: slot for slot, path in enumerate(shape.paths, start=1)}}
    levels = []
    for depth in range(shape.depth):
        inner = [path for path in slots if len(path) == depth and shape.num_children(path)]
        children = [path for path in shape.paths if len(path) == depth + 1]
        fanout = [shape.num_children(path) for path in inner]
        levels.append(
            Level(
                column([slots[path] for path in inner]),
                column([slots[path[:-1]] for path in inner]),
                column(fanout),
                max(fanout),
                column([slots[path] for path in children]),
                column([inner.index(path[:-1]) for path in children]),
                column([path[-1] for path in children]),
            )
        )
    return Plan(
        levels,
        column([slots[path[:-1]] - 1 for path in shape.paths]),
        column([len(path) for path in shape.paths]),
        column([shape.num_children(path) for path in slots]),
    )
