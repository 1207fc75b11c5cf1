"""Traversal verification: leaves first (Weng et al. 2025), in the form that takes any law of siblings."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.laws import Kind, first_law, next_law
from vllm_adaptive_tree.acceptance.rejection import rounding
from vllm_adaptive_tree.acceptance.walk import Accepted
from vllm_adaptive_tree.noise import Noise
from vllm_adaptive_tree.trees import TreeBatch


def traversal(
    tree: TreeBatch,
    kind: Kind,
    p_rows: Callable[[Tensor, Tensor], Tensor],
    q_rows: Callable[[Tensor], tuple[Tensor, Tensor]],
    noise: Noise,
    *,
    levels: int,
    most: int,
    among: Tensor | None = None,
    proceed: Callable[[Tensor], bool] = lambda active: True,
) -> Accepted:
    """Accept the deepest path that the laws allow; on a rejected leaf, go on with its next sibling.

    From the root always into the first child that is left, down to a leaf Y, which is accepted together with its path
    with probability acc(Y). acc(root) = 1 and acc(x) = min(1, acc(X) P_X(x) / D_x(x)) for a child x of X. A rejected
    leaf is deleted, and P_X becomes norm((acc(X) P_X - D_x)+).

    Args:
        p_rows: (node [R], active [R] bool) -> target law [R, V] behind that node (-1: the root).
        q_rows: node [R] -> draft law [R, V] from which its children were drawn, and how many were to be drawn [R].
        levels, most: the largest depth, and the most children that a node was to get.
        among: [R] bool, the requests to verify; the others emit nothing that means anything.
        proceed: may read `active` to end the loop early.
    """
    requests, slots = tree.tokens.shape
    root = torch.full((requests,), -1, device=tree.tokens.device)
    p = p_rows(root, torch.ones_like(root, dtype=torch.bool))
    q, drawn = q_rows(root)
    row = torch.arange(requests, device=root.device)

    def per_level(fill: Tensor) -> Tensor:  # one entry for every depth of the path: [R, L + 1, ...]
        return fill[:, None].repeat(1, levels + 1, *[1] * (fill.dim() - 1))

    p_at, q_at, d_at, drawn_at = per_level(p), per_level(q), per_level(q), per_level(drawn)
    acc = per_level(torch.ones_like(p[:, 0]))
    path, rank = per_level(root), per_level(torch.zeros_like(root))  # rank: children deleted so far
    depth = torch.zeros_like(root)
    active = torch.ones_like(root, dtype=torch.bool) if among is None else among
    extra = root.clone()
    for step in range(2 * slots + 1):
        coins = noise.at(torch.full_like(root, step))
        node = path[row, depth]
        child = tree.nth_child(node, rank[row, depth])
        down = active & (child >= 0)
        # the next child becomes the first one
        x = tree.tokens.gather(1, child.clamp(min=0)[:, None])[:, 0]
        last = tree.nth_child(node, rank[row, depth] - 1)
        before = tree.tokens.gather(1, last.clamp(min=0)[:, None])[:, 0]
        first = rank[row, depth] == 0
        here = q_at[row, depth]
        d = torch.where(
            first[:, None],
            first_law(kind, here, drawn_at[row, depth], most, x),
            next_law(kind, here, d_at[row, depth], before, x),
        )
        p_x, d_x = (law.gather(1, x.clamp(min=0)[:, None])[:, 0] for law in (p_at[row, depth], d))
        d_at[row, depth] = torch.where(down[:, None], d, d_at[row, depth])
        below = (depth + 1).clamp(max=levels)
        reach = (acc[row, depth] * p_x / d_x).nan_to_num(0.0).clamp(max=1.0)
        acc[row, below] = torch.where(down, reach, acc[row, below])
        path[row, below] = torch.where(down, child, path[row, below])
        rank[row, below] = torch.where(down, 0, rank[row, below])
        new_p = p_rows(torch.where(down, child, -1), down)
        new_q, new_drawn = q_rows(torch.where(down, child, -1))
        p_at[row, below] = torch.where(down[:, None], new_p, p_at[row, below])
        q_at[row, below] = torch.where(down[:, None], new_q, q_at[row, below])
        drawn_at[row, below] = torch.where(down, new_drawn, drawn_at[row, below])
        # a leaf: accept its path, or delete it
        leaf = active & ~down
        coin = coins.accept(torch.where(leaf & (depth > 0), acc[row, depth], 1.0))
        token = coins.choose(p_at[row, depth])
        done = leaf & coin
        extra = torch.where(done, token, extra)
        reject = leaf & ~coin
        above = (depth - 1).clamp(min=0)
        acc_x = acc[row, above]
        residual = (acc_x[:, None] * p_at[row, above] - d_at[row, above]).clamp(min=0)
        mass = residual.sum(-1)
        norm = residual / mass.clamp(min=torch.finfo(p.dtype).tiny)[:, None]
        kept = torch.where(mass <= rounding(p), 0.0, mass)
        p_at[row, above] = torch.where((reject & (kept > 0))[:, None], norm, p_at[row, above])
        new_acc = (kept / (kept + 1 - acc_x)).nan_to_num(0.0)
        acc[row, above] = torch.where(reject & (above > 0), new_acc, acc_x)
        rank[row, above] = torch.where(reject, rank[row, above] + 1, rank[row, above])
        depth = torch.where(down, depth + 1, torch.where(reject, depth - 1, depth))
        active = active & ~done
        if not proceed(active):
            break

    level = torch.arange(levels + 1, device=root.device)[None]
    inner = level < depth[:, None]
    nodes = torch.where(inner, path.roll(-1, 1), -1)
    tokens = torch.where(inner, tree.tokens.gather(1, nodes.clamp(min=0)), -1)
    return Accepted(torch.where(level == depth[:, None], extra[:, None], tokens), nodes)
