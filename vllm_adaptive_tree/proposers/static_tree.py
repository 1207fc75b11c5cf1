"""Static trees: one fixed shape, with any kind of children (EAGLE-1, Medusa, MCSD, SpecInfer, SpecHub)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import KINDS, Kind
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.options import is_int, option
from vllm_adaptive_tree.proposers.base import Proposal, Proposer, Request, rng_keys, softmax_at
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.proposers.options import MethodOptions
from vllm_adaptive_tree.trees import Shape, SlicedMask, TreeBatch
from vllm_adaptive_tree.trees.orders import permuted
from vllm_adaptive_tree.trees.tree_batch import EMPTY

SHAPES = ("eagle1", "binary", "ternary")
CHILDREN: dict[str, Kind] = {"top_k": "one_hot", **{kind: kind for kind in KINDS if kind != "one_hot"}}
"""Names that users write -> kinds of children."""


def is_k_config(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(is_int(k) and k >= 1 for k in value)


def _is_shape(value: Any) -> bool:
    if is_k_config(value):
        return True
    rows = isinstance(value, list | tuple) and bool(value) and all(isinstance(path, list | tuple) for path in value)
    if not rows or not all(is_int(rank) and rank >= 0 for path in value for rank in path):
        return False
    Shape.of(value)  # raises a ValueError that names the fault
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedOptions(MethodOptions):
    """Options of methods with a fixed shape and a choice of the kind of children."""

    children: str | None = option(
        None, lambda value: value is None or value in tuple(CHILDREN), f"one of {', '.join(map(repr, CHILDREN))}"
    )
    """Kind of children; None: the kind that the acceptance rule needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTreeOptions(ShapedOptions):
    shape: Any = option(
        "eagle1",
        lambda value: value in SHAPES if isinstance(value, str) else _is_shape(value),
        "'eagle1', 'binary', 'ternary', a k-config as [4, 2, 2, 1], or rank paths as [[0], [1], [0, 0]]",
    )


class ShapeLevel(NamedTuple):
    """The inner nodes of one level of a shape, and the slots of their children; slot 0 is the root."""

    inner: Tensor  # [W] slots
    above: Tensor  # [W] slots of their parents
    fanout: Tensor  # [W]
    max_fanout: int
    children: Tensor  # [C] slots
    column: Tensor  # [C]: index of the parent among the inner nodes
    rank: Tensor  # [C]


class ShapeTensors(NamedTuple):
    """A shape as tensors, built once per shape and device."""

    levels: list[ShapeLevel]
    parent: Tensor  # [N]
    depth: Tensor  # [N]
    fanout: Tensor  # [1 + N], the root first


class ShapeGrowth(NamedTuple):
    tokens: Tensor  # [R, 1 + N], the root first
    path: Tensor  # [R, 1 + N] log path probability
    read: Tensor  # [R, 1 + N]
    going: Tensor  # [R] bool
    level: int
    next_slot: int  # of the drafter
    plan: ShapeTensors
    request: Request


class StaticTree(Proposer):
    """Tree of `shape` cut to the node budget, with children of the given kind; greedy requests get top-k children."""

    fused = "vllm_adaptive_tree.kernels.proposers:FusedStaticTree"
    capturable = True
    Options: ClassVar[type[MethodOptions]] = StaticTreeOptions
    kinds: tuple[Kind, ...] = ("without_replacement", "one_hot", "iid", "hub_pair", "top_k_plus_one")

    def __init__(self, shape: Shape, *, kind: Kind = "without_replacement"):
        self.shape, self.kind = shape, kind
        self.max_depth, self.max_children, self.max_nodes = shape.depth, shape.max_children, len(shape)

    @classmethod
    def build(cls, options: Any, *, nodes: int) -> Self:
        return cls(_shape(options.shape, nodes)).with_children(options)

    def with_children(self, options: ShapedOptions) -> Self:
        """Set the kind of children, if the options name one; returns itself."""
        if options.children is not None:
            self.kinds = (CHILDREN[options.children],)
        return self

    @property
    def by_place(self) -> bool:
        return self.kind != "one_hot"

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> ShapeGrowth:
        shape = self.shape.cut(nodes)
        logits = rows.logits
        empty = torch.full((len(logits), 1 + len(shape)), -1, device=logits.device)
        path = torch.zeros_like(softmax_at(logits[:, :, 0], request.temperature)).expand(empty.shape).contiguous()
        going = torch.ones_like(empty[:, 0], dtype=torch.bool)
        growth = ShapeGrowth(empty, path, empty, going, 0, 0, _plan(shape, logits.device), request)
        return self.extend(growth, rows)

    def mask(self, nodes: int) -> SlicedMask:
        return SlicedMask.cached(self.shape.cut(nodes))

    def growing(self, growth: ShapeGrowth) -> Tensor:
        return growth.going & (growth.level < len(growth.plan.levels))

    def frontier(self, growth: ShapeGrowth) -> Frontier:
        if growth.level >= len(growth.plan.levels):
            return Frontier(growth.tokens[:, :0], growth.read[:, :0])
        level = growth.plan.levels[growth.level]
        tokens = growth.tokens.index_select(1, level.inner).masked_fill(~growth.going[:, None], EMPTY)
        return Frontier(tokens, growth.read.index_select(1, level.above).clamp(min=0))

    def extend(self, growth: ShapeGrowth, rows: Rows) -> ShapeGrowth:
        level, request, logits = growth.plan.levels[growth.level], growth.request, rows.logits
        width = logits.shape[1]
        inner = level.inner[:width]
        slot = growth.next_slot + torch.arange(width, device=logits.device).expand(len(logits), width)
        from_target = _from_target(request.initial, growth)
        assert rows.dead is not None
        exists = growth.going[:, None] & (~rows.dead | from_target[:, None])
        if growth.level:
            exists = exists & (growth.tokens.index_select(1, inner) != EMPTY)
        q = softmax_at(logits, request.temperature[:, None])  # [R, W, V]
        fanout = level.fanout[:width].expand(slot.shape)
        rng = request.rng.fold_in(rng_keys(growth.level, logits))
        tokens = draw_children(self.kind, q, fanout, level.max_fanout, rng, request.greedy)  # [R, W, K]
        if request.initial is not None and growth.level == 0:
            tokens = torch.where(from_target[:, None, None], request.initial[:, None, : tokens.shape[2]], tokens)
        tokens = tokens.masked_fill(~exists[:, :, None], EMPTY)
        child_path = q.gather(2, tokens.clamp(min=0)).log() + growth.path.index_select(1, inner)[:, :, None]
        # trimmed columns, and children beyond a small vocabulary, stay empty
        padding = (0, level.max_fanout - tokens.shape[2], 0, len(level.inner) - width)
        tokens = torch.nn.functional.pad(tokens, padding, value=EMPTY)
        child_path = torch.nn.functional.pad(child_path, padding)
        index = level.column * level.max_fanout + level.rank  # [C] in [W * K]
        return growth._replace(
            tokens=growth.tokens.index_copy(1, level.children, tokens.flatten(1).index_select(1, index)),
            path=growth.path.index_copy(1, level.children, child_path.flatten(1).index_select(1, index)),
            read=growth.read.index_copy(1, inner, torch.where(exists, slot, -1)),
            going=growth.going & (self.goes_on(q, rows.hidden, exists) | from_target),
            level=growth.level + 1,
            next_slot=growth.next_slot + width,
        )

    def goes_on(self, q: Tensor, hidden: Tensor | None, used: Tensor) -> Tensor:
        """Trees for which to draft a level below the one just drawn from q [R, W, V]: [R] bool.

        `used`: [R, W] bool, the nodes whose children were drawn.
        """
        return torch.ones_like(used[:, 0])

    def finish(self, growth: ShapeGrowth) -> Proposal:
        tokens, path, read = growth.tokens[:, 1:], growth.path[:, 1:], growth.read[:, 1:]
        _, parent, depth, fanout = growth.plan
        num_planned = torch.where(growth.read >= 0, fanout, 0)
        # pack the nodes to the left, in their order
        order = (tokens == EMPTY).int().sort(dim=1, stable=True).indices
        tree = permuted(TreeBatch(tokens, parent.expand_as(tokens), depth.expand_as(tokens), path), order)
        tree, read = tree.cut(tree.valid.sum(1)), read.gather(1, order)
        return Proposal(tree, read, torch.cat([num_planned[:, :1], num_planned[:, 1:].gather(1, order)], 1))


def _shape(shape: Any, nodes: int) -> Shape:
    if isinstance(shape, str):
        return Shape.named(shape, nodes).cut(nodes)
    return Shape.k_config(shape, nodes) if isinstance(shape[0], int) else Shape.of(shape).cut(nodes)


def _from_target(initial: Tensor | None, growth: ShapeGrowth) -> Tensor:
    """Trees [R] bool whose next level was sampled by the target."""
    if initial is None or growth.level > 0:
        return torch.zeros_like(growth.going)
    return (initial >= 0).any(1)


@lru_cache(maxsize=64)
def _plan(shape: Shape, device: torch.device) -> ShapeTensors:
    def column(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)

    slots = {(): 0, **{path: slot for slot, path in enumerate(shape.paths, start=1)}}
    levels = []
    for depth in range(shape.depth):
        inner = [path for path in slots if len(path) == depth and shape.num_children(path)]
        children = [path for path in shape.paths if len(path) == depth + 1]
        fanout = [shape.num_children(path) for path in inner]
        levels.append(
            ShapeLevel(
                column([slots[path] for path in inner]),
                column([slots[path[:-1]] for path in inner]),
                column(fanout),
                max(fanout),
                column([slots[path] for path in children]),
                column([inner.index(path[:-1]) for path in children]),
                column([path[-1] for path in children]),
            )
        )
    return ShapeTensors(
        levels,
        column([slots[path[:-1]] - 1 for path in shape.paths]),
        column([len(path) for path in shape.paths]),
        column([shape.num_children(path) for path in slots]),
    )
