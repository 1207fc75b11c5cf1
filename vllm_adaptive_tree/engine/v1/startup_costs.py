"""Costs of forwards on Model Runner V1, measured when the engine starts; only the null block is written."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.engine.startup.measuring import (
    MAX_ROWS,
    POINTS,
    MeasuredCosts,
    fastest_on_rank_0,
    run_once,
    threshold,
    timeout_of_rank_0,
)
from vllm_adaptive_tree.engine.v1.attention import native_metadata

THRESHOLD_ROUNDS, ROUNDS = 20, 5
SECONDS = 15.0
"""Seconds after which a profile keeps the points that it has."""
WARM_ROWS, WARM_SECONDS = 64, 2.0
"""Most rows that the warm-up runs, and seconds after which it ends."""
NO_SLOT = -1  # vLLM's cache update writes nothing there
STRIDE = 7919
"""Distance between the tokens of the rows: a prime, so that they differ."""
CONTEXT = 1024
"""Tokens of the measured context, if the model reads as many."""


def measured_threshold(runner: Any, nodes: int) -> float:
    """Threshold for `threshold: "auto"`: the cost of a draft level of `nodes` rows in target forwards of `nodes` + 1
    rows (mu in OPT-Tree, arXiv 2406.17276)."""
    forwards = partial(draft_level, runner.drafter, nodes), partial(target_forward, runner, nodes + 1)
    level, target = fastest_on_rank_0(
        forwards, rounds=THRESHOLD_ROUNDS, seconds=SECONDS, least=len(forwards), device=runner.device
    ).seconds
    return threshold(level / target)


def measured_costs(runner: Any, nodes: int) -> MeasuredCosts:
    """Initial costs for `budget: "auto"`: those of a verification by rows of one tree after an empty context, of a
    draft level of up to `nodes`, and of a row's context."""
    most = min(MAX_ROWS, runner.scheduler_config.max_num_batched_tokens)
    rows, levels = profiled_rows(most), sorted({1, 2, min(4, max(2, nodes)), max(2, nodes)})
    few = min(8, most)
    length = max(0, min(CONTEXT, runner.max_model_len - few))
    forwards = [partial(draft_level, runner.drafter, count) for count in levels]
    forwards += [partial(target_forward, runner, few, tokens) for tokens in (0, length)]
    least = len(forwards) + POINTS
    forwards += [partial(target_forward, runner, count) for count in rows]
    seconds, disturbance = fastest_on_rank_0(
        forwards, rounds=ROUNDS, seconds=SECONDS, least=least, device=runner.device
    )
    draft, (empty, full), verify = seconds[: len(levels)], seconds[len(levels) :][:2], seconds[len(levels) + 2 :]
    reading = max(0.0, full - empty) / few / length if length else 0.0
    return MeasuredCosts(Costs(Curve(rows[: len(verify)], verify), Curve(levels, draft), reading), disturbance)


def warm_up(runner: Any, nodes: int) -> None:
    """Run draft levels and verifications of every number of rows once: a matrix product of a new size builds its kernel
    (7 of 30 ms with SmolLM2), and the trees of a new engine have another size in every step."""
    most = min(WARM_ROWS, runner.max_num_reqs * (1 + nodes), runner.scheduler_config.max_num_batched_tokens)
    forwards = [partial(draft_level, runner.drafter, rows) for rows in range(1, 1 + nodes)]
    forwards += [partial(target_forward, runner, rows) for rows in range(1, 1 + most)]
    run_once(forwards, seconds=WARM_SECONDS, sync_timeout=timeout_of_rank_0(runner.device))


def draft_level(drafter: Any, nodes: int) -> Callable[[], Tensor]:
    state = drafter.sample_state()
    level = torch.zeros(1, nodes, dtype=torch.int64)
    return lambda: drafter.grow(level, level, state)[0].logits


def target_forward(runner: Any, rows: int, context: int = 0) -> Callable[[], Tensor]:
    """Forward that verifies a chain after `context` tokens, all in the null block; with a recurrent state, which has
    room for so many drafts, as many chains as it takes. The cost of branches is learnt from live steps, which an
    estimate that is too high would prevent."""
    slots, start = torch.full((rows,), NO_SLOT), torch.zeros(rows, dtype=torch.int64)
    if runner.uses_mrope:
        start = start.repeat(runner.mrope_num_dims, 1)
    # Equal tokens would be routed to the same experts, and a mixture of experts would look as cheap as one row.
    tokens = torch.arange(rows, dtype=torch.int32) * STRIDE % runner.model_config.get_vocab_size()
    longest = 1 + runner.num_spec_tokens if runner.model_config.is_hybrid else rows
    lengths = [min(longest, rows - first) for first in range(0, rows, longest)]
    ends = [context + lengths[0], *lengths[1:]]
    metadata: dict[str, Any] = {}
    for group, layers in runner.attention.groups():
        table = torch.zeros(len(lengths), context + longest, dtype=torch.int32)
        builder, more = group.get_metadata_builder(0), {}
        if isinstance(group.kv_cache_spec, MambaSpec):  # decodes whose last step accepted nothing
            drafts = torch.tensor(lengths, dtype=torch.int32) - 1
            more = {"num_accepted_tokens": torch.ones_like(drafts), "num_decode_draft_tokens_cpu": drafts}
        native = native_metadata(builder, lengths, ends, table, slots, **more)
        metadata.update(dict.fromkeys(layers, native))

    if runner.lora_config is not None:
        runner._set_active_loras((0,) * rows, (0,) * rows, set())  # rows without an adapter

    def forward() -> Tensor:
        ids: Tensor | None = tokens
        embeddings = None
        if runner.supports_mm_inputs or runner.enable_prompt_embeds:  # text, too, comes as embeddings
            embeddings = runner.inputs_embeds.gpu[:rows]
            embeddings.copy_(runner.model.embed_input_ids(tokens))
            ids = tokens if getattr(runner.model, "requires_raw_input_tokens", False) else None
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=rows, slot_mapping=dict.fromkeys(metadata, slots)
        ):
            hidden = runner.model(input_ids=ids, positions=start, inputs_embeds=embeddings)
        if isinstance(hidden, tuple):  # with the states of auxiliary layers
            hidden = hidden[0]
        logits: Tensor = runner.model.compute_logits(hidden)
        return logits

    return forward
