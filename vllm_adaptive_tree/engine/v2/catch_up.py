"""Draft model that can skip steps, and catches up on the skipped tokens later."""

from typing import Any

import numpy as np
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_adaptive_tree.engine.v2.draft_backlog import DraftBacklog, Gap
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput
from vllm_adaptive_tree.engine.v2.paged_draft import PagedDraft


class CatchUpSpeculator(PagedDraft, StandaloneARSpeculator):
    """Speculator for drafts that read token ids alone, which can be read later."""

    tokens: Tensor
    """vLLM's tokens [requests, length], by its index of the request."""
    reads_late = True
    backlog: DraftBacklog | None = None

    def skip(self, batch: Any, which: np.ndarray) -> None:
        """Note that the draft does not read this step of the requests `which` [R] bool."""
        if self.backlog is not None:
            requests = batch.idx_mapping_np[which]
            self.backlog.skipped(requests, batch.num_computed_tokens_np[which], batch.num_scheduled_tokens[which])

    def rest(self, target: TargetOutput) -> None:
        self.skip(target.batch, np.ones(target.batch.num_reqs, dtype=bool))

    def catch_up(self, target: TargetOutput, drafting: np.ndarray | None) -> np.ndarray | None:
        """Read skipped tokens, as many as a batch may have; requests with more of them wait for the next step."""
        batch = target.batch
        if self.backlog is None:
            return drafting
        room, gaps = self.max_num_tokens, []
        late = np.zeros(batch.num_reqs, dtype=bool) if drafting is None else ~drafting
        for gap in self.backlog.gaps(batch.idx_mapping_np, batch.num_computed_tokens_np):
            if late[gap.row]:
                continue
            end = min(gap.end, gap.start + room)
            late[gap.row] = end < gap.end
            if end > gap.start:
                gaps.append(gap._replace(end=end))
                self.backlog.read(batch.idx_mapping_np[gap.row], gap.start, end, whole=end == gap.end)
            room -= end - gap.start
        if late.any():
            self.skip(batch, late)
        if gaps:
            self._read(batch, gaps)
        self.missed = self.max_num_tokens - room
        return ~late if late.any() else None

    def _read(self, batch: Any, gaps: list[Gap]) -> None:
        """Run one forward over tokens that are in the target's cache; the host does not know their exact end, and K/V
        after it is not stored."""
        rows, start, end = np.array(gaps).T
        length = end - start
        total = int(length.sum())
        first = np.concatenate([[0], length.cumsum()])
        of = np.repeat(np.arange(len(gaps)), length)
        row, place, of, row_start, ends = (
            async_tensor_h2d(array, device=self.device)
            for array in (rows, np.arange(total) - (first[:-1] - start)[of], of, first, end)
        )
        request, begin = batch.idx_mapping[row], batch.positions[batch.query_start_loc[row]]
        metadata, slots = self.metadata_of(
            request, row_start, ends, place, length, end, self.expanded_slot_mappings, place >= begin[of]
        )
        self._run_model(self.tokens[request[of], place].int(), place, metadata, slots, None)
        self.block_tables.gather_block_tables(batch.idx_mapping, batch.num_reqs_after_padding)
