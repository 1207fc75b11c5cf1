"""What forwards cost, measured when the engine starts; nothing is written to the cache, but for the null block."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.curve import profiled_rows
from vllm_adaptive_tree.engine.cost_profile import threshold
from vllm_adaptive_tree.engine.cpu_attention import native_metadata
from vllm_adaptive_tree.engine.drafter import CatchUp
from vllm_adaptive_tree.engine.ranks import from_rank_0

ROUNDS = 20
PROFILE_ROUNDS = 5
PROFILE_SECONDS = 10.0
"""After these, a profile keeps the points that it has."""
NO_SLOT = -1  # vLLM's cache update writes nothing there
CONTEXT = 1024
"""Tokens, where the model reads as many."""


def measured_threshold(runner: Any, nodes: int) -> float:
    """`threshold: "auto"`: what a draft level costs in target forwards (mu in OPT-Tree, arXiv 2406.17276).

    Median of 20 draft levels at `nodes` rows over median of 20 target forwards at `nodes` + 1 rows, clamped. Every rank
    runs the forwards; rank 0's ratio counts.
    """
    level = _median_seconds(lambda: _draft_level(runner.drafter, nodes))
    target = _median_seconds(lambda: _target_forward(runner, nodes + 1))
    ratio = float(from_rank_0(torch.tensor(level / target, dtype=torch.float64)))
    return threshold(ratio)


def verification_curve(runner: Any, most: int) -> Curve:
    """Seconds of a verification by rows, up to `most` of one tree behind an empty context."""
    started, points = time.perf_counter(), []
    for count in profiled_rows(most):
        # the fastest: other programs only add to it, and live times follow
        points.append((count, min(_seconds(partial(_target_forward, runner, count), PROFILE_ROUNDS))))
        late = len(points) > 2 and time.perf_counter() - started > PROFILE_SECONDS
        if bool(from_rank_0(torch.tensor(late, dtype=torch.int64))):
            break
    return Curve(*from_rank_0(torch.tensor(points, dtype=torch.float64)).t())


def measured_costs(runner: Any, nodes: int, most: int) -> Costs:
    """What `budget: "auto"` begins with: the costs of a verification of up to `most` rows, of a draft level of up to
    `nodes`, and of a context."""
    verify = verification_curve(runner, most)
    rows = sorted({1, 2, min(4, max(2, nodes)), max(2, nodes)})
    levels = [min(_seconds(partial(_draft_level, runner.drafter, count), PROFILE_ROUNDS)) for count in rows]
    few = min(8, most)
    length = min(CONTEXT, runner.max_model_len - few)
    reading = 0.0
    if length > 0:
        empty, full = (
            min(_seconds(partial(_target_forward, runner, few, tokens), PROFILE_ROUNDS)) for tokens in (0, length)
        )
        reading = max(0.0, full - empty) / length
    figures = from_rank_0(torch.tensor([*levels, reading], dtype=torch.float64)).tolist()
    return Costs(verify, Curve(rows, figures[:-1]), figures[-1])


def _median_seconds(prepare: Callable[[], Callable[[], Tensor]], rounds: int = ROUNDS) -> float:
    return statistics.median(_seconds(prepare, rounds))


def _seconds(prepare: Callable[[], Callable[[], Tensor]], rounds: int) -> list[float]:
    """`prepare` returns the forward to time; one untimed round warms up."""
    seconds = []
    for _ in range(rounds + 1):
        forward = prepare()
        started = time.perf_counter()
        forward()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _draft_level(drafter: Any, nodes: int) -> Callable[[], Tensor]:
    _, state = drafter.catch_up([CatchUp(row=0, start=0, tokens=[0], rooted=True)])
    level = torch.zeros(1, nodes, dtype=torch.int64)
    return lambda: drafter.grow(level, level, state)[0].logits


def _target_forward(runner: Any, rows: int, context: int = 0) -> Callable[[], Tensor]:
    """A verification of a chain behind `context` tokens, all in the null block. What branches cost more is learnt from
    live steps, which a cost that is too high would prevent."""
    slots, start = torch.full((rows,), NO_SLOT), torch.zeros(rows, dtype=torch.int64)
    metadata: dict[str, Any] = {}
    for group, layers in runner.target_groups():
        table = torch.zeros(1, context + rows, dtype=torch.int32)
        builder = group.get_metadata_builder(0)
        native = native_metadata(builder, [rows], [context + rows], table, slots)
        metadata.update(dict.fromkeys(layers, native))

    def forward() -> Tensor:
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=rows, slot_mapping=dict.fromkeys(metadata, slots)
        ):
            hidden = runner.model(input_ids=start.int(), positions=start)
        logits: Tensor = runner.model.compute_logits(hidden)
        return logits

    return forward
