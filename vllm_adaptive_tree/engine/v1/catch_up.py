"""What the draft has to read before it grows trees: the tokens of this step, and those of steps that it skipped."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_adaptive_tree.engine.common.coverage import Coverage


class CatchUp(NamedTuple):
    """Tokens of one request from position `start` on, the new root last if there is one."""

    row: int  # of the request in vLLM's batch
    start: int  # the draft's K/V is in the cache up to here
    tokens: list[int]
    has_root: bool  # a tree shall grow from the last token, which is read again in the next step


def new_tokens(runner: Any, scheduled: Mapping[str, int], sampled: Sequence[bool], nodes: int) -> list[CatchUp]:
    """The tokens of this step, of every request that has any for the draft; `nodes`: room of each tree."""
    batch, found = runner.input_batch, []
    limit = runner.effective_drafter_max_model_len
    for row, name in enumerate(batch.req_ids):
        state = runner.requests[name]
        start = int(batch.num_computed_tokens_cpu[row])
        end = int(batch.num_tokens_no_spec[row]) if sampled[row] else start + scheduled[name]
        max_tokens = state.sampling_params.max_tokens
        finishing = max_tokens is not None and max_tokens - len(state.output_token_ids) <= 1
        has_root = sampled[row] and nodes > 0 and not finishing and end < min(limit, runner.max_model_len)
        end = min(end if has_root or not sampled[row] else end - 1, limit)
        if end > start:
            found.append(CatchUp(row, start, batch.token_ids_cpu[row, start:end].tolist(), has_root))
    return found


def without_gaps(runner: Any, coverage: Coverage, news: list[CatchUp], room: int, drafting: bool) -> list[CatchUp]:
    """The items of a step that is `drafting`, each from where the draft has read to, and no more than `room` tokens
    together; `coverage` is updated."""
    blocks = runner.drafter.block_table.block_table.np
    items = []
    for item in news:
        table, end = blocks[item.row], item.start + len(item.tokens)
        start = coverage.reach(table, item.start)
        coverage.skipped(table, item.start, end)
        if not drafting:
            continue
        if start < item.start or end - start > room:
            read = runner.input_batch.token_ids_cpu[item.row, start : min(end, start + room)].tolist()
            item = CatchUp(item.row, start, read, item.has_root and len(read) == end - start)
        room -= len(item.tokens)
        if item.tokens:
            items.append(item)
            coverage.read(table, start, start + len(item.tokens) - item.has_root)
    return items
