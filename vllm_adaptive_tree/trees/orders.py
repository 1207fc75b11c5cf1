"""Node orders that leave large blocks of the tree mask empty (DySpec, arXiv 2410.11744, appendix C).

The orders are for the forward pass only: trees are always pruned in generation order.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.trees.masks import jumps
from vllm_adaptive_tree.trees.tree_batch import TreeBatch


def depth_first(parent: Tensor, valid: Tensor | None = None) -> Tensor:
    """Depth first, children in generation order: rank -> node, [R, N] int64.

    Earlier siblings tend to have the larger subtrees, so this is close to `heavy_path`.

    Args:
        parent: [R, N], every parent before its children; -1: the root.
        valid: [R, N] bool, default all: True for slots that hold a node. Empty slots go to the end, in their order.
    """
    valid = torch.ones_like(parent, dtype=torch.bool) if valid is None else valid
    slots = torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    return _visit(parent, valid, _subtree_sizes(parent, valid), slots)


def heavy_path(parent: Tensor, valid: Tensor | None = None) -> Tensor:
    """Depth first, children by decreasing subtree size, ties in generation order: rank -> node, [R, N] int64.

    Near-optimal in the number of non-empty blocks. Arguments as for `depth_first`.
    """
    valid = torch.ones_like(parent, dtype=torch.bool) if valid is None else valid
    size = _subtree_sizes(parent, valid)
    return _visit(parent, valid, size, size.argsort(dim=1, descending=True, stable=True))


def permuted(tree: TreeBatch, order: Tensor) -> TreeBatch:
    """The same trees with node `order[r, i]` ([R, N]) in slot i."""
    columns = TreeBatch(*(column.gather(1, order) for column in tree))
    return columns._replace(parent=_permuted_parent(tree.parent, order))


def mask_blocks(parent: Tensor, order: Tensor, valid: Tensor | None = None, *, block: int = 32) -> Tensor:
    """Number of non-zero block x block tiles of the ancestor-or-self mask (without the root) in this order: [R].

    Args:
        parent, valid: [R, N], as for `depth_first`.
        order: [R, N], rank -> node.
    """
    valid = torch.ones_like(parent, dtype=torch.bool) if valid is None else valid
    rows = parent.shape[1]
    tiles = -(-rows // block)
    column = torch.arange(rows, device=parent.device) // block  # [N]: tile of a node as an ancestor
    seen = column[:, None] == torch.arange(tiles, device=parent.device)  # [N, T]
    seen = pad(seen & valid.gather(1, order)[:, :, None], (0, 0, 1, 0))  # [R, N + 1, T]
    for up in jumps(_permuted_parent(parent, order)):
        seen = seen | seen.gather(1, up[:, :, None].expand_as(seen))
    seen = pad(seen[:, 1:], (0, 0, 0, tiles * block - rows))
    return seen.unflatten(1, (tiles, block)).any(2).sum((1, 2))


def _subtree_sizes(parent: Tensor, valid: Tensor) -> Tensor:
    """Number of valid nodes in the subtree of each node, itself included: [R, N]."""
    size = pad(valid.long(), (1, 0))  # counts nodes less than 1, 2, 4, ... levels below; slot 0 is unused
    for up in jumps(parent):
        size = size.scatter_add(1, up, size)
    return size[:, 1:]


def _visit(parent: Tensor, valid: Tensor, size: Tensor, siblings: Tensor) -> Tensor:
    """Depth first, the children of each node in the order in which `siblings` [R, N] lists them: rank -> node.

    Position of a node = its parent's + 1 + the subtree sizes of its earlier siblings.
    """
    node = siblings.gather(1, parent.gather(1, siblings).argsort(dim=1, stable=True))  # [R, N], by parent
    above, size = parent.gather(1, node), size.gather(1, node)
    before = size.cumsum(1) - size  # other parents' children included
    first = pad(above[:, 1:] != above[:, :-1], (1, 0), value=True)
    before = before - before.masked_fill(~first, 0).cummax(1).values
    position = pad(torch.empty_like(node).scatter_(1, node, before + 1), (1, 0))
    for up in jumps(parent):
        position = position + position.gather(1, up)
    return position[:, 1:].masked_fill(~valid, parent.shape[1] + 1).argsort(dim=1, stable=True)


def _permuted_parent(parent: Tensor, order: Tensor) -> Tensor:
    slots = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, slots)  # node -> rank
    return torch.where(parent < 0, -1, rank.gather(1, parent.clamp(min=0))).gather(1, order)
