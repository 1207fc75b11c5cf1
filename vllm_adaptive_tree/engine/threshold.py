"""`threshold: "auto"`: what a draft level costs, in target forwards (mu in OPT-Tree, arXiv 2406.17276)."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from vllm_adaptive_tree.engine.attention import TreeMetadata, TreeRows, VerifyKeys
from vllm_adaptive_tree.engine.drafter import NO_SLOT, CatchUp
from vllm_adaptive_tree.engine.ranks import from_rank_0

ROUNDS = 20
LOWEST, HIGHEST = 0.05, 0.9


def measured_threshold(runner: Any, nodes: int) -> float:
    """Median of 20 draft levels at `nodes` rows over median of 20 target forwards at `nodes` + 1 rows, clamped.

    Every rank runs the forwards; rank 0's ratio counts. Nothing is written to the cache.
    """
    level = _median_seconds(lambda: _draft_level(runner.drafter, nodes))
    target = _median_seconds(lambda: _target_forward(runner, nodes + 1))
    ratio = float(from_rank_0(torch.tensor(level / target, dtype=torch.float64)))
    return min(max(ratio, LOWEST), HIGHEST)


def _median_seconds(prepare: Callable[[], Callable[[], Tensor]]) -> float:
    """`prepare` returns the forward to time; one untimed round warms up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        forward = prepare()
        started = time.perf_counter()
        forward()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _draft_level(drafter: Any, nodes: int) -> Callable[[], Tensor]:
    _, state = drafter.catch_up([CatchUp(row=0, start=0, tokens=[0], rooted=True)])
    level = torch.zeros(1, nodes, dtype=torch.int64)
    return lambda: drafter.grow(level, level, state)[0]


def _target_forward(runner: Any, rows: int) -> Callable[[], Tensor]:
    """A verification of `rows` rows behind an empty context."""
    trees = TreeRows(torch.arange(rows), torch.arange(rows), (1, rows))
    mask = torch.ones(1, rows, rows, dtype=torch.bool).tril()
    keys = VerifyKeys(trees, torch.zeros(1, 0, dtype=torch.int32), 1, torch.zeros(1), mask)
    metadata = TreeMetadata(None, trees.rows[:0], trees, keys)
    slots, start = torch.full((rows,), NO_SLOT), torch.zeros(rows, dtype=torch.int64)
    layers = list(runner.compilation_config.static_forward_context)

    def forward() -> Tensor:
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            runner.vllm_config,
            num_tokens=rows,
            slot_mapping=dict.fromkeys(layers, slots),
        ):
            hidden = runner.model(input_ids=start.int(), positions=start)
        logits: Tensor = runner.model.compute_logits(hidden)
        return logits

    return forward
