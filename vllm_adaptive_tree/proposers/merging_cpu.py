"""Merging of continuations on CPUs, in compiled loops."""

# mypy: disable-error-code="untyped-decorator"

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.proposers.base import Proposal
from vllm_adaptive_tree.proposers.merging import GOES_ON
from vllm_adaptive_tree.trees import TreeBatch

LOG_GOES_ON = np.float32(math.log(GOES_ON))


def merge(proposal: Proposal, continuations: Continuations, *, nodes: int, most: int) -> Proposal:
    """As `merging.merge`."""
    tree, cell = proposal.tree, proposal.cell
    given = [part.numpy() for part in (*tree[:3], proposal.read, proposal.num_planned)]
    given.append(np.full_like(given[3], -1) if cell is None else cell.numpy())
    value = tree.log_weight.float().numpy()
    tokens, weight = (np.ascontiguousarray(part.numpy()) for part in continuations)
    requests, size = given[3].shape
    nodes = min(nodes, size + tokens[0].size)
    columns = np.full((6, requests, nodes), -1, np.int64)
    best = np.full((requests, nodes), -np.inf, np.float32)
    planned = np.zeros((requests, 1 + nodes), np.int64)
    _merge(*map(np.ascontiguousarray, (*given, value)), tokens, weight, most, columns, best, planned)
    token, parent, depth, read, cells, chosen = torch.from_numpy(columns).unbind(0)
    merged = TreeBatch(token, parent, depth.clamp_(min=0), torch.from_numpy(best))
    return Proposal(merged, read, torch.from_numpy(planned), None if cell is None else cells, chosen > 0)


def draft_levels(tree: TreeBatch, continuations: Continuations) -> Tensor:
    """As `merging.draft_levels`."""
    parts: list[NDArray[Any]] = [np.ascontiguousarray(part.numpy()) for part in (*tree[:3], *continuations)]
    levels = np.empty_like(parts[2])
    _levels(*parts, levels)
    return torch.from_numpy(levels)


@njit(
    "(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], float32[:, ::1],"
    " int64[:, :, ::1], float32[:, ::1], int64, int64[:, :, ::1], float32[:, ::1], int64[:, ::1])"
)
def _merge(tokens, parent, depth, read, planned, cell, value, chains, weight, most, columns, best, counts):  # type: ignore[no-untyped-def]
    """Fill `columns` (token, parent, depth, read, cell, chosen), `best` values and planned `counts` of the trees."""
    size, more = read.shape[1], chains.shape[1] * chains.shape[2]
    token, above, deep = (
        np.empty(size + more, np.int64),
        np.empty(size + more, np.int64),
        np.empty(size + more, np.int64),
    )
    mass, worth = np.empty(size + more, np.float32), np.empty(size + more, np.float32)
    child, sibling = np.empty(1 + size + more, np.int64), np.empty(size + more, np.int64)
    place, children = np.empty(1 + size + more, np.int64), np.empty(1 + size + more, np.int64)  # the root's first
    for r in range(len(chains)):
        used = 0
        child[0] = -1
        for i in range(size):
            if tokens[r, i] < 0:
                break
            token[i], above[i], deep[i], worth[i], mass[i] = tokens[r, i], parent[r, i], depth[r, i], value[r, i], 0
            child[1 + i], sibling[i] = -1, child[1 + above[i]]
            child[1 + above[i]] = i
            used += 1
        drafted = used
        for m in range(chains.shape[1]):
            if not weight[r, m] > 0:
                continue
            at = -1
            for level in range(chains.shape[2]):
                one = chains[r, m, level]
                if one < 0:
                    break
                node = child[1 + at]
                while node >= 0 and token[node] != one:
                    node = sibling[node]
                if node < 0:
                    node = used
                    used += 1
                    token[node], above[node], deep[node], worth[node], mass[node] = one, at, level + 1, -np.inf, 0
                    child[1 + node], sibling[node] = -1, child[1 + at]
                    child[1 + at] = node
                mass[node] += weight[r, m]
                at = node
        for i in range(used):  # parents first
            if mass[i] > 0:
                worth[i] = max(worth[i], np.log(mass[i]) + np.float32(deep[i] - 1) * LOG_GOES_ON)
            if above[i] >= 0:
                worth[i] = min(worth[i], worth[above[i]])
        order = np.argsort(-worth[:used], kind="mergesort")  # stable
        place[: 1 + used], children[: 1 + used] = -2, 0  # -2: not in the tree
        place[0] = -1
        counts[r, 0] = planned[r, 0]
        new = 0
        for old in order:
            if new == len(best[r]):
                break
            if place[1 + above[old]] == -2 or children[1 + above[old]] == most:
                continue
            children[1 + above[old]] += 1
            place[1 + old] = new
            columns[0, r, new], columns[2, r, new], best[r, new] = token[old], deep[old], worth[old]
            columns[1, r, new] = place[1 + above[old]]
            columns[5, r, new] = old >= drafted or worth[old] > value[r, old]
            if old < drafted:
                columns[3, r, new], columns[4, r, new] = read[r, old], cell[r, old]
                counts[r, 1 + new] = planned[r, 1 + old]
            new += 1


@njit("(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, :, ::1], float32[:, ::1], int64[:, ::1])")
def _levels(tokens, parent, depth, chains, weight, levels):  # type: ignore[no-untyped-def]
    """Fill `levels` with each node's depth, or 0 if it is on a continuation."""
    on = np.empty((tokens.shape[1], chains.shape[1]), np.bool_)
    for r in range(len(tokens)):
        for i in range(tokens.shape[1]):
            above, level, found = parent[r, i], depth[r, i] - 1, False
            for m in range(chains.shape[1]):
                here = 0 <= level < chains.shape[2] and weight[r, m] > 0 and chains[r, m, level] == tokens[r, i]
                on[i, m] = here and tokens[r, i] >= 0 and (above < 0 or on[above, m])
                found = found or on[i, m]
            levels[r, i] = 0 if found else depth[r, i]
