"""Cost of a tree outside the model forwards: per method and phase, beside a floor.

    python -m benchmarks.tree_work --out benchmarks/results/tree_work.json

Batch 8, 60 nodes, a vocabulary of 32,000, laws drawn at random (as peaked as a small draft's), no model. `law`: the row
softmax of every row the method reads. `selection`: the rest of drafting. `walk`: acceptance, the target's own softmax
included. The floor of drafting is one float32 softmax over the rows it reads, the walk's one over the rows it visits.
Medians over rounds. The walk's rows are the target's; acceptance follows from these laws.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES, Children, traversal, walk
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG

REQUESTS, NODES, VOCABULARY, ROUNDS = 8, 60, 32_000, 7
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("opt_tree", "target_only", {"threshold": 0}),
    ("eagle2", "target_only", {}),
    ("dyspec", "rrsw", {"mode": "threshold", "threshold": 0.01}),
    ("dyspec", "rrsw", {"mode": "heap"}),
    ("dyspec", "traversal", {"mode": "heap"}),
    ("static_tree", "target_only", {"shape": "binary", "children": "top_k"}),
    ("static_tree", "rrsw", {"shape": "binary"}),
    ("static_tree", "rrs", {"shape": "binary"}),
    ("static_tree", "k_seq", {"shape": "binary"}),
    ("static_tree", "spechub", {"shape": "binary"}),
    ("static_tree", "greedy_multi_draft", {"shape": "ternary"}),
    ("static_tree", "traversal", {"shape": "binary"}),
    ("mcsd", "rrsw", {"shape": [4, 2, 2, 1]}),
]


@cache
def pool() -> Tensor:
    return 4 * torch.randn(REQUESTS, 64, VOCABULARY, generator=torch.Generator().manual_seed(0))


class Laws:
    """A drafter without a model: rows are taken from a pool; its own time is measured separately."""

    def __init__(self) -> None:
        self.pool = pool()
        self.seconds, self.rows, self.widths = 0.0, 0, [1]

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Rows, Any]:
        return Rows(self.pool[:, :1]), None

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        started = time.perf_counter()
        width = tokens.shape[1]
        logits = self.pool[:, :width].clone()
        self.widths.append(width)
        self.seconds += time.perf_counter() - started
        return Rows(logits), state


def cut(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    used = (frontier.tokens >= 0).any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 0
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), width > 0


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def softmax_seconds(pool: Tensor, widths: list[int]) -> float:
    temperature = torch.full((REQUESTS, 1), 0.8)
    return sum(seconds(lambda width=width: softmax_at(pool[:, :width], temperature)) for width in widths)


def floor_seconds(pool: Tensor, widths: list[int]) -> float:
    return sum(seconds(lambda width=width: pool[:, :width].softmax(-1)) for width in widths)


def once(method: str, rule: str, tree_options: dict[str, Any], number: int) -> dict[str, float]:
    options, _ = TreeOptions.parse(
        {
            "method": method,
            "model": "none",
            "num_speculative_tokens": NODES,
            "rejection_sample_method": rule,
            "tree": tree_options,
        }
    )
    pair, drafter = resolve(options), Laws()
    seed, position = torch.arange(REQUESTS), torch.full((REQUESTS,), number)
    rng = [CounterRNG(seed, position, purpose) for purpose in (0, 1)]
    request = Request(torch.full((REQUESTS,), 0.8), torch.zeros(REQUESTS, dtype=torch.bool), rng[0])
    rows, state = drafter.catch_up(None, None)
    started = time.perf_counter()
    proposal = draft_tree(pair.proposer, drafter, rows, state, nodes=NODES, request=request, agree=cut)
    drafting = time.perf_counter() - started - drafter.seconds
    visited = [0]
    walking = seconds(lambda: _walk(pair, rule, proposal, drafter.pool, rng[1], visited))
    law = softmax_seconds(drafter.pool, drafter.widths)
    return {
        "rows": sum(drafter.widths),
        "law": law,
        "selection": max(drafting - law, 0.0),
        "draft_floor": floor_seconds(drafter.pool, drafter.widths),
        "walk": walking,
        "walk_floor": floor_seconds(drafter.pool, [1] * visited[0]),
    }


def _walk(pair: Any, rule: str, proposal: Proposal, pool: Tensor, rng: CounterRNG, visited: list[int]) -> None:
    tree, most = proposal.tree, min(pair.proposer.max_children, NODES)
    temperature = torch.full((REQUESTS,), 0.8)

    def p_rows(node: Tensor, active: Tensor) -> Tensor:
        visited[0] += 1
        return softmax_at(pool[torch.arange(REQUESTS), 1 + node % 60], temperature)

    def q_rows(node: Tensor) -> tuple[Tensor, Tensor]:
        q = softmax_at(pool[torch.arange(REQUESTS), node % 64], temperature)
        return q, proposal.num_planned.gather(1, node[:, None] + 1)[:, 0]

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        p = p_rows(node, active)
        q, drawn = (p, drawn_none) if rule == "target_only" else q_rows(node)
        token = RULES[rule].draw(p, q, Children(tree.children(node, widest), drawn, most), rng.fold_in(node + 1))
        return token, torch.ones_like(active)

    drawn_none = torch.zeros(REQUESTS, dtype=torch.int64)
    levels = int(tree.depth.max())
    widest = int(torch.zeros(REQUESTS, NODES + 1).scatter_add(1, tree.parent + 1, tree.valid.float()).max())
    if RULES[rule].draw is None:
        traversal(tree, pair.proposer.kind, p_rows, q_rows, rng, levels=levels, most=most, proceed=any_active)
    else:
        walk(tree, draw, levels=levels, proceed=any_active)


def any_active(active: Tensor) -> bool:
    return bool(active.any())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for method, rule, tree in CASES:
        once(method, rule, tree, 0)
        found = [once(method, rule, tree, number) for number in range(1, ROUNDS + 1)]
        row: dict[str, Any] = {"method": method, "rule": rule, "tree": tree}
        row |= {key: statistics.median(one[key] for one in found) for key in found[0]}
        row["draft_ratio"] = (row["law"] + row["selection"]) / row["draft_floor"]
        row["walk_ratio"] = row["walk"] / row["walk_floor"]
        rows.append(row)
        shown = {key: round(1000 * row[key], 2) for key in ("law", "selection", "draft_floor", "walk", "walk_floor")}
        print(
            method,
            rule,
            tree,
            row["rows"],
            shown,
            round(row["draft_ratio"], 2),
            round(row["walk_ratio"], 2),
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
