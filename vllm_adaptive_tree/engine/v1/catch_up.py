"""Tokens that the draft reads before it grows trees: those of this step, and of steps that it skipped."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.common.request_flags import most_nodes


class CatchUp(NamedTuple):
    """Tokens of one request to read, and the root of the tree after them."""

    row: int  # of the request in vLLM's batch
    start: int  # the draft's K/V is in the cache up to here
    tokens: list[int]  # for the positions from there on
    root: int | None  # position of the root as the target counts; None: no tree
    states: Sequence[int] = ()  # rows of the step's flat batch with the target's states for a head
    waited: tuple[Tensor, ...] = ()  # [n, H] states of the first tokens, of earlier steps
    late: int = 0  # positions before `start` that a head has read for it in this step


def states_of_step(items: Sequence[CatchUp], states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The target's states of this step, [n, H] of each item."""
    rows = torch.tensor([row for item in items for row in item.states])
    joined = torch.cat([state.index_select(0, rows) for state in states], -1)
    return joined.split([len(item.states) for item in items])


class StepView(NamedTuple):
    """View of a step for its drafting."""

    runner: Any
    scheduled: Mapping[str, int]  # tokens by request
    sampled: Sequence[bool]  # True if a request has sampled, by row
    nodes: int  # room of each tree

    def spans(self) -> list[tuple[int, int, int, int | None]]:
        """Row of each request of the batch, its tokens read before this step, its tokens known now, and the position of
        its root; None: it is finishing, has tokens left to read, is too long for the draft, or wants no trees."""
        runner, batch, spans = self.runner, self.runner.input_batch, []
        limit, count = min(runner.effective_drafter_max_model_len, runner.max_model_len), len(batch.req_ids)
        starts, ends = batch.num_computed_tokens_cpu[:count].tolist(), batch.num_tokens_no_spec[:count].tolist()
        for row, (name, start, known) in enumerate(zip(batch.req_ids, starts, ends, strict=True)):
            state = runner.requests[name]
            end = known if self.sampled[row] else start + self.scheduled[name]
            max_tokens = state.sampling_params.max_tokens
            finishing = max_tokens is not None and max_tokens - len(state.output_token_ids) <= 1
            wanted = min(self.nodes, most_nodes(state.sampling_params)) > 0
            grows = self.sampled[row] and wanted and not finishing and end < limit
            spans.append((row, start, end, end - 1 if grows else None))
        return spans

    def new_tokens(self) -> list[CatchUp]:
        """Tokens for a draft that reads the target's, the root last; one item per request that has any."""
        limit, items = self.runner.effective_drafter_max_model_len, []
        for row, start, end, root in self.spans():
            end = min(end if root is not None or not self.sampled[row] else end - 1, limit)
            if end > start:
                items.append(CatchUp(row, start, self._text(row, start, end), root))
        return items

    def new_states(self, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        """Tokens and states for a head: at each position that the target has read, its state there and the token after
        it.

        Args:
            accepted: nodes of each tree of the step, by row.
        """
        limit, items = self.runner.effective_drafter_max_model_len, []
        for row, start, end, root in self.spans():
            end = min(end - 1 if self.sampled[row] else end, limit)
            if end > start:
                verification, path = self.runner.step.verification, accepted.get(row)
                first = verification.row_start[row]
                rows = (
                    list(range(first, first + end - start))
                    if path is None
                    else [verification.row_of(row, node) for node in (-1, *path)][: end - start]
                )
                assert len(rows) == end - start, f"{len(rows)} states of {end - start} tokens in row {row}"
                items.append(CatchUp(row, start, self._text(row, start + 1, end + 1), root, rows))
        return items

    def _text(self, row: int, start: int, end: int) -> list[int]:
        tokens: list[int] = self.runner.input_batch.token_ids_cpu[row, start:end].tolist()
        return tokens


def without_gaps(runner: Any, coverage: Coverage, pending: list[CatchUp], room: int, drafting: bool) -> list[CatchUp]:
    """Items of a step that is `drafting`, each from the end of the draft's coverage, of at most `room` tokens together;
    updates `coverage`."""
    blocks, names = runner.drafter.block_table.block_table.np, runner.input_batch.req_ids
    for item in pending:  # a prefix hit may be on blocks that another request fills in this step
        start = runner.loaded.get(names[item.row], item.start)
        coverage.skipped(blocks[item.row], start, item.start + len(item.tokens))
    items = []
    for item in pending if drafting else []:
        table, end = blocks[item.row], item.start + len(item.tokens)
        start = coverage.reach(table, item.start)
        if start < item.start or end - start > room:
            read = runner.input_batch.token_ids_cpu[item.row, start : min(end, start + room)].tolist()
            item = CatchUp(item.row, start, read, item.root if len(read) == end - start else None)
        room -= len(item.tokens)
        if item.tokens:
            items.append(item)
            coverage.read(table, start, start + len(item.tokens) - (item.root is not None))
    return items
