"""Cost of a tree outside the model forwards: per method and phase, beside a floor.

    python -m benchmarks.tree_work --out benchmarks/results/tree_work.json

Batch 8, 60 nodes, a vocabulary of 32,000, laws drawn at random (as peaked as a small draft's), no model. `law`: the row
softmax of every row the method reads. `selection`: the rest of drafting. `walk`: acceptance, the target's own softmax
included. The floor of drafting is one float32 softmax over the rows it reads, the walk's one over the rows it visits.
Medians over rounds. The walk's rows are the target's; acceptance follows from these laws.

On Model Runner V1, in CPU time of one thread, least over rounds: `--part level`, OPT-Tree's choice among the rows of
one level beside one read of their bfloat16 logits (`amax`); `--part step`, all levels of a step of 24 nodes by method;
`--part host`, what a step does with finished trees outside the forwards.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES, Accepted, Children, traversal, walk
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import Proposal, Proposer, Request, Steered, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG

REQUESTS, NODES, VOCABULARY, ROUNDS = 8, 60, 32_000, 7
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("adaptive_tree", "traversal", {}),
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

    def __init__(self, logits: Tensor, clock: Callable[[], float] = time.perf_counter) -> None:
        self.pool, self.clock = logits, clock
        self.seconds, self.rows, self.widths = 0.0, 0, [1]

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Rows, Any]:
        return Rows(self.pool[:, :1]), None

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        started = self.clock()
        width = tokens.shape[1]
        logits = self.pool[:, :width].clone()
        self.widths.append(width)
        self.seconds += self.clock() - started
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
    pair, drafter = resolve(options), Laws(pool())
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


LEVELS = [(requests, vocabulary) for vocabulary in (8_192, 32_768, 131_072) for requests in (1, 8, 64)]
STEPS = [("opt_tree", 0.6, True), ("adaptive_tree", 0.6, True), ("adaptive_tree", 1.0, False)]


def cpu_seconds(run: Callable[[], Any]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def on_v1(method: str, nodes: int) -> Proposer:
    options, _ = TreeOptions.parse({"method": method, "model": "none", "num_speculative_tokens": nodes})
    return resolve(options).proposer.for_cpu()


def level_work(requests: int, vocabulary: int, *, width: int = 24) -> dict[str, float]:
    """Choice among the rows of one level of `width` nodes per request, 8 for many requests."""
    width = width if requests < 64 else 8
    generator = torch.Generator().manual_seed(0)
    logits = (2.5 * torch.randn(requests, width, vocabulary, generator=generator)).bfloat16()
    proposer, chosen = on_v1("opt_tree", 24), torch.ones(requests, dtype=torch.bool)
    zeros = torch.zeros(requests, dtype=torch.int64)
    request = Request(torch.full((requests,), 0.8), chosen, CounterRNG(zeros, zeros, 0), None, chosen)
    roots, _ = proposer.check(Rows(logits[:, :1].clone()), request.temperature)
    growth = proposer.begin(roots, nodes=24, request=request)

    def choose() -> None:
        rows, _ = proposer.check(Rows(logits), request.temperature)
        proposer.extend(growth, rows)

    rounds = range(ROUNDS)
    read, chosen_in = (min(cpu_seconds(run) for _ in rounds) for run in (lambda: logits.amax(-1), choose))
    return {"requests": requests, "vocabulary": vocabulary, "read": read, "choice": chosen_in}


def step_work(
    method: str, temperature: float, greedy: bool, requests: int, vocabulary: int, *, nodes: int = 24
) -> dict[str, Any]:
    """All levels of a step."""
    proposer, seconds = on_v1(method, nodes), []
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(requests, nodes, vocabulary, generator=generator)).bfloat16()
    flags = torch.full((requests,), greedy)
    for number in range(ROUNDS):
        drafter = Laws(logits, time.thread_time)
        rng = CounterRNG(torch.arange(requests), torch.full((requests,), number), 0)
        request = Request(torch.full((requests,), temperature), flags, rng, None, flags)
        rows, state = drafter.catch_up(None, None)
        rows = Rows(rows.logits.clone())
        started = time.thread_time()
        draft_tree(proposer, drafter, rows, state, nodes=nodes, request=request, agree=cut)
        seconds.append(time.thread_time() - started - drafter.seconds)
    place = {"method": method, "temperature": temperature, "requests": requests, "vocabulary": vocabulary}
    return {**place, "seconds": min(seconds)}


def host_work(requests: int, nodes: int) -> dict[str, Any]:
    """From a proposal to drafts, rows, positions and the budget's observation."""
    from vllm_adaptive_tree.budget import Budget
    from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
    from vllm_adaptive_tree.engine.v1.budget import HostBudget
    from vllm_adaptive_tree.engine.v1.clock import PhaseClock
    from vllm_adaptive_tree.engine.v1.drafts import to_drafts
    from vllm_adaptive_tree.engine.v1.verification import Verification

    generator, proposer = torch.Generator().manual_seed(0), on_v1("opt_tree", nodes)
    drafter = Laws(4 * torch.randn(requests, nodes, 512, generator=generator))
    temperature, flags = torch.full((requests,), 0.6), torch.ones(requests, dtype=torch.bool)
    zeros = torch.zeros(requests, dtype=torch.int64)
    request = Request(temperature, flags, CounterRNG(zeros, zeros, 0))
    rows, state = drafter.catch_up(None, None)
    proposal = draft_tree(proposer, drafter, rows, state, nodes=nodes, request=request, agree=cut)
    value, count = proposal.tree.log_weight.exp().numpy(), 1 + nodes
    budget = HostBudget(Budget(sampled=False), ThresholdController(proposer, Steered()), PhaseClock())
    accepted = Accepted(torch.ones(requests, 2).long(), torch.tensor([[0, -1]]).expand(requests, 2))
    positions, tokens = torch.zeros(requests * count, dtype=torch.int64), np.zeros(requests * count, np.int32)
    starts, counts, computed = list(range(0, requests * count, count)), [count] * requests, [500] * requests

    valued = zip(to_drafts(proposal, [], temperature), value, proposal.tree.depth.numpy(), strict=True)
    drafts = {row: draft._replace(value=own, depth=deep, greedy=True) for row, (draft, own, deep) in enumerate(valued)}
    assert proposal.tree.valid.all()

    def step() -> Tensor:
        to_drafts(proposal, [], temperature)
        verification = Verification(drafts, starts, counts, computed, 512)
        verification.write_rows(tokens, positions, torch.arange(requests * count))
        budget.verified(verification, accepted)
        return verification.tree.tokens

    return {"requests": requests, "nodes": nodes, "seconds": min(cpu_seconds(step) for _ in range(5 * ROUNDS))}


def any_active(active: Tensor) -> bool:
    return bool(active.any())


def cpu_rows(part: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    if part == "host":
        rows = [host_work(*size) for size in ((64, 24), (128, 128))]
    elif part == "level":
        rows = [level_work(*place) for place in LEVELS]
    else:
        rows = [step_work(*case, *place) for place in LEVELS if place[0] < 64 for case in STEPS]
    for row in rows:
        shown = {"read", "choice", "seconds"}
        print({key: round(1000 * value, 2) if key in shown else value for key, value in row.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["tree", "level", "step", "host"], default="tree")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [] if options.part == "tree" else cpu_rows(options.part)
    for method, rule, tree in CASES if options.part == "tree" else ():
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
        save(options.out, rows)


if __name__ == "__main__":
    main()
