"""Traversal verification of children drawn without replacement, compiled for a CPU."""

# mypy: disable-error-code="untyped-decorator"

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.walk import Accepted
from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.rng_compiled import uniform
from vllm_adaptive_tree.trees import TreeBatch

SURE = 1e-3
"""Least draft probability left after the drawn siblings that a difference from 1 says well enough."""
TINY = 1e-300
ROUNDING = 1e-6
"""As `rejection.rounding_mass`."""


class Rows(NamedTuple):
    """Distributions of one request: after the root, then each node."""

    request: int
    p: Tensor  # [1 + N, V] float32: the target's
    q: Tensor  # [I, V] float32: those that the children of inner nodes were drawn from
    row: np.ndarray  # [1 + N] int64: of `q`, -1 for a node that was never read
    chosen: np.ndarray  # [N] bool: nodes without a draw


def traversal_of_rows(tree: TreeBatch, rows: list[Rows], rng: CounterRNG, *, levels: int) -> Accepted:
    """Accept as `traversal`, for the requests of these `rows`; the output of others is undefined."""
    requests, vocabulary = len(tree.tokens), rows[0].p.shape[1]
    end, depth = (np.full(requests, fill) for fill in (-1, 0))
    path, last = np.full((requests, levels + 2), -1), torch.zeros(requests, vocabulary)
    keys, tokens, parents = rng.key.numpy(), tree.tokens.numpy(), tree.parent.numpy()
    for request, p, q, row, chosen in rows:
        size = len(p) - 1
        lists = tokens[request, :size], parents[request, :size], row, chosen
        end[request], depth[request] = _traverse(
            *map(np.ascontiguousarray, lists), p.numpy(), q.numpy(), keys[request], path[request], last[request].numpy()
        )
    ends, depths, paths = torch.from_numpy(end), torch.from_numpy(depth)[:, None], torch.from_numpy(path)
    bonus = torch.where(ends >= 0, rng.fold_in(ends).sample(last), -1)
    level = torch.arange(levels + 1)[None]
    nodes = torch.where(level < depths, paths[:, 1:], -1)
    drafted = torch.where(nodes >= 0, tree.tokens.gather(1, nodes.clamp(min=0)), -1)
    return Accepted(torch.where(level == depths, bonus[:, None], drafted), nodes)


@njit()
def _nth_child(parent, node, number):  # type: ignore[no-untyped-def]
    """Child of a node, counted from 0; -1: it has fewer."""
    for other in range(node + 1, len(parent)):
        if parent[other] == node:
            if number == 0:
                return other
            number -= 1
    return -1


@njit()
def _drawn(tokens, parent, node, count):  # type: ignore[no-untyped-def]
    """Tokens of the first `count` children of a node."""
    found = np.empty(count, np.int64)
    for number in range(count):
        found[number] = tokens[_nth_child(parent, node, number)]
    return found


@njit(fastmath={"reassoc", "nsz"})
def _positive_part(p, acc, q, left, gone, out):  # type: ignore[no-untyped-def]
    """Write (acc * p - d)+, d: q without the tokens `gone`, which had `left`, 0 if nothing; returns its mass."""
    scale, part, mass = np.float32(acc), np.float32(1 / left if left > 0 else 0.0), 0.0
    for start in range(0, len(p), 1024):
        total = np.float32(0)
        for at in range(start, min(start + 1024, len(p))):
            value = max(scale * p[at] - part * q[at], np.float32(0))
            out[at] = value
            total += value
        mass += float(total)
    for token in gone:
        mass += float(scale * p[token] - out[token])
        out[token] = scale * p[token]
    return mass


@njit(fastmath={"reassoc", "nsz"})
def _rest(q, gone):  # type: ignore[no-untyped-def]
    """Mass of q without the tokens `gone`."""
    rest, others = 0.0, q.copy()
    for token in gone:
        others[token] = 0
    for at in range(len(others)):
        rest += others[at]
    return rest


@njit(
    "UniTuple(int64, 2)(int64[::1], int64[::1], int64[::1], boolean[::1], float32[:, ::1], float32[:, ::1], int64,"
    " int64[::1], float32[::1])"
)
def _traverse(tokens, parent, q_row, chosen, p, q, key, path, last):  # type: ignore[no-untyped-def]
    """Returns the step and the depth of acceptance; writes the `path` there, and the distribution `last` after it."""
    size, most, vocabulary = len(tokens), len(path), p.shape[1]
    rank, acc, left = np.zeros(most, np.int64), np.ones(most), np.ones(most)
    residuals, rejected = np.empty((most + 1, vocabulary), np.float32), np.zeros(most, np.bool_)
    place, free = np.arange(most), most  # rows of `residuals` by depth, and one to write to
    depth, path[0] = 0, -1
    for step in range(2 * size + 1):
        node = path[depth]
        child = _nth_child(parent, node, rank[depth])
        if child >= 0:
            token, at = tokens[child], q_row[1 + node]
            mass = residuals[place[depth], token] if rejected[depth] else p[1 + node, token]
            reach, drawn = acc[depth] * mass, 1.0 if chosen[child] else q[at, token] / left[depth]
            depth += 1
            path[depth], rank[depth], left[depth], rejected[depth] = child, 0, 1.0, False
            acc[depth] = min(1.0, reach / max(drawn, TINY)) if reach > 0 else 0.0
            continue
        if depth == 0 or uniform(key, step, 2) < acc[depth]:
            last[:] = residuals[place[depth]] if rejected[depth] else p[1 + node]
            return step, depth
        token, one_hot, depth = tokens[node], chosen[node], depth - 1
        node, at = path[depth], q_row[1 + path[depth]]
        before = residuals[place[depth]] if rejected[depth] else p[1 + node]
        gone = _drawn(tokens, parent, node, rank[depth])
        kept = _positive_part(before, acc[depth], q[at], 0.0 if one_hot else left[depth], gone, residuals[free])
        if one_hot:
            kept -= residuals[free, token]
            residuals[free, token] = 0
        if kept > ROUNDING:
            residuals[free] *= np.float32(1 / kept)
            place[depth], free, rejected[depth] = free, place[depth], True
        else:
            kept = 0.0
        if depth > 0:
            acc[depth] = kept / (kept + 1 - acc[depth]) if kept > 0 else 0.0
        rank[depth] += 1
        left[depth] -= q[at, token]
        if left[depth] < SURE:
            left[depth] = _rest(q[at], _drawn(tokens, parent, node, rank[depth]))
    return -1, 0
