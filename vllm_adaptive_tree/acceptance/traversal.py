"""Traversal verification, leaves first (Weng et al., arXiv 2505.12398), generalised to any distribution of siblings,
among children drawn without replacement also chosen ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import one_hot, positive_part, rounding_mass, where_rows
from vllm_adaptive_tree.acceptance.rule import Kind, Rule
from vllm_adaptive_tree.acceptance.sibling_probs import first_child_probs, next_child_probs
from vllm_adaptive_tree.acceptance.walk import Accepted
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import TreeBatch


class Traversal(Rule):
    """`traversal` as a rule."""

    kinds = ("without_replacement", "iid", "hub_pair", "top_k_plus_one", "one_hot")
    draw = None  # type: ignore[assignment]


def traversal(
    tree: TreeBatch,
    kind: Kind,
    p_rows: Callable[[Tensor, Tensor], Tensor],
    q_rows: Callable[[Tensor], tuple[Tensor, Tensor]],
    rng: RandomSource,
    *,
    levels: int,
    most: int,
    chosen: Tensor | None = None,
    active: Tensor | None = None,
    proceed: Callable[[Tensor], bool] = lambda active: True,
) -> Accepted:
    """Try to accept whole paths, deepest first; after a rejected leaf, continue with its next sibling.

    Descend from the root into the first remaining child until a leaf Y, and accept Y and its path with probability
    acc(Y), where acc(root) = 1 and acc(x) = min(1, acc(X) P_X(x) / D_x(x)) for a child x of X. A rejected leaf is
    deleted, and P_X becomes norm((acc(X) P_X - D_x)+).

    Args:
        p_rows: (node [R], active [R] bool) -> target distribution [R, V] at that node (-1: the root).
        q_rows: node [R] -> draft distribution [R, V] its children were drawn from, and the number planned [R].
        levels: upper bound of the depth.
        most: upper bound of the children planned for a node.
        chosen: [R, N] bool, nodes without a draw, whatever the `kind` of their siblings; None: there is none.
        active: [R] bool, the requests to verify; the output of the others is undefined.
        proceed: called with `active`; returning false ends the loop early.
    """
    requests, slots = tree.tokens.shape
    root = torch.full((requests,), -1, device=tree.tokens.device)
    p = p_rows(root, torch.ones_like(root, dtype=torch.bool))
    q, num_planned = q_rows(root)
    row = torch.arange(requests, device=root.device)

    def per_level(fill: Tensor) -> Tensor:  # one entry for every depth of the path: [R, L + 2, ...]
        return fill[:, None].repeat(1, levels + 2, *[1] * (fill.dim() - 1))

    # Rows with nothing to write write to the last, unused entry: cheaper than read, select and write back.
    unused = torch.full_like(root, levels + 1)
    p_at, q_at, d_at, planned_at = per_level(p), per_level(q), per_level(q), per_level(num_planned)
    drawn_at = d_at if chosen is None else d_at.clone()  # of the last child, had it been drawn
    acc = per_level(torch.ones_like(p[:, 0]))
    path, rank = per_level(root), per_level(torch.zeros_like(root))  # rank: number of deleted children
    depth = torch.zeros_like(root)
    active = torch.ones_like(root, dtype=torch.bool) if active is None else active
    end = root.clone()  # the step of acceptance
    for step in range(2 * slots + 1):
        step_rng = rng.fold_in(torch.full_like(root, step))
        node, deleted = path[row, depth], rank[row, depth]
        child = tree.nth_child(node, deleted)
        down = active & (child >= 0)
        x = tree.tokens.gather(1, child.clamp(min=0)[:, None])[:, 0]
        last = tree.nth_child(node, deleted - 1)
        before = tree.tokens.gather(1, last.clamp(min=0)[:, None])[:, 0]
        q_here = q_at[row, depth]
        d = where_rows(
            deleted == 0,
            first_child_probs(kind, q_here, planned_at[row, depth], most, x),
            next_child_probs(kind, q_here, drawn_at[row, depth], before, x),
        )
        if chosen is not None:
            drawn_at[row, torch.where(down, depth, unused)] = d
            d = where_rows(chosen.gather(1, child.clamp(min=0)[:, None])[:, 0], one_hot(x, d), d)
        at = x.clamp(min=0)
        reach = (acc[row, depth] * p_at[row, depth, at] / d[row, at]).nan_to_num(0.0).clamp(max=1.0)
        d_at[row, torch.where(down, depth, unused)] = d
        below = torch.where(down, depth + 1, unused)
        acc[row, below], path[row, below], rank[row, below] = reach, child, torch.zeros_like(root)
        new = torch.where(down, child, -1)
        p_at[row, below] = p_rows(new, down)
        q_at[row, below], planned_at[row, below] = q_rows(new)
        # at a leaf: accept its path, or delete it
        leaf = active & ~down
        accept = step_rng.accept(torch.where(leaf & (depth > 0), acc[row, depth], 1.0))
        done, reject = leaf & accept, leaf & ~accept
        end = torch.where(done, step, end)
        above = (depth - 1).clamp(min=0)
        acc_x = acc[row, above]
        norm, mass = positive_part(acc_x[:, None] * p_at[row, above], d_at[row, above])
        kept = torch.where(mass <= rounding_mass(p), 0.0, mass)
        p_at[row, torch.where(reject & (kept > 0), above, unused)] = norm
        new_acc = (kept / (kept + 1 - acc_x)).nan_to_num(0.0)
        acc[row, torch.where(reject & (above > 0), above, unused)] = new_acc
        rank[row, torch.where(reject, above, unused)] = rank[row, above] + 1
        depth = torch.where(down, depth + 1, torch.where(reject, depth - 1, depth))
        active = active & ~done
        if not proceed(active):
            break
    bonus = torch.where(end >= 0, rng.fold_in(end).sample(p_at[row, depth]), -1)

    level = torch.arange(levels + 1, device=root.device)[None]
    inner = level < depth[:, None]
    nodes = torch.where(inner, path[:, 1:], -1)
    tokens = torch.where(inner, tree.tokens.gather(1, nodes.clamp(min=0)), -1)
    return Accepted(torch.where(level == depth[:, None], bonus[:, None], tokens), nodes)
