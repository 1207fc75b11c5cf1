"""Heads that read the target's states, which wait while the head rests."""

from abc import abstractmethod
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.paged_draft import only_roots
from vllm_adaptive_tree.engine.v2.unread_states import Late, UnreadStates


def states_of(target: TargetOutput) -> Tensor:
    """[rows, H or more]: of the layers that a head reads, side by side, or the last."""
    return torch.cat(target.auxiliary, -1) if target.auxiliary else target.hidden


class ReadsStates(TreeDrafting):
    """Mixin before `TreeDrafting`, of heads that make K/V of the target's states. At rest they cost a copy of these."""

    unread: UnreadStates | None = None

    @cached_property
    def may_wait(self) -> bool:
        """False with a KV connector, which would take what waits as it is."""
        return self.vllm_config.kv_transfer_config is None

    @abstractmethod
    def read_late(self, late: Late) -> None:
        """Write K/V of states that have waited."""

    def read_at_rest(self, target: TargetOutput) -> None:
        """Read a step of which not all can wait."""
        self.read(target)

    def rest(self, target: TargetOutput) -> None:
        """Nothing is read while all that is new can wait. Prompts are read, and blocks of a request are complete before
        another shares them: that one has a prompt, and a request that leaves is read (`settle`)."""
        if not self._wait(target, np.ones(target.batch.num_reqs, dtype=bool)):
            self.catch_up(target, None)
            self.read_at_rest(target)

    def _wait(self, target: TargetOutput, which: np.ndarray) -> bool:
        """Let the requests `which` [R] bool wait, and return True, if all that is new of them can."""
        if not self.may_wait:
            return False
        batch, unread, step = target.batch, self.waiting_room(target), self.accepted
        requests = batch.idx_mapping_np[which]
        verified = batch.num_tokens - batch.num_reqs  # nodes of the batch, where each request has one row besides
        most = 0 if step is None else min(verified, step[1].nodes.shape[1])
        if not only_roots(batch) or not unread.fits(requests, 1 + most):
            return False
        row = batch.query_start_loc[: batch.num_reqs, None].long()
        if step is not None and most:
            row = torch.cat([row, row + 1 + step[1].nodes[:, :most]], 1)
        index, num_sampled = batch.idx_mapping, target.num_sampled
        if not which.all():
            places = async_tensor_h2d(np.flatnonzero(which), device=self.device)
            row, index, num_sampled = row[places], index[places], num_sampled[places]
        end = self.states.num_computed_tokens.gpu[index]
        unread.keep(requests, index, end, num_sampled, row, states_of(target))
        return True

    def catch_up(self, target: TargetOutput, drafting: np.ndarray | None) -> np.ndarray | None:
        batch, unread = target.batch, self.unread
        if drafting is not None and not self._wait(target, ~drafting):
            drafting = None
        requests = np.arange(self.max_num_reqs) if drafting is None else batch.idx_mapping_np[drafting]
        if unread is not None and unread.count[requests].any():
            end = self.states.num_computed_tokens.gpu.clone()
            end[batch.idx_mapping] -= target.num_sampled
            self.missed = self._read_waiting(unread, requests, end)
            self.block_tables.gather_block_tables(batch.idx_mapping, batch.num_reqs_after_padding)
        return drafting

    @torch.inference_mode()
    def settle(self) -> None:
        if self.unread is not None and self.unread.count.any() and not self.off:
            self._read_waiting(self.unread, np.arange(self.max_num_reqs), self.states.num_computed_tokens.gpu)

    def forget(self, request: str) -> None:
        super().forget(request)
        if self.unread is not None and self.unread.count[self.states.req_id_to_index[request]]:
            self.settle()

    def _read_waiting(self, unread: UnreadStates, requests: np.ndarray, end: Tensor) -> int:
        """Read what waits of these requests, and return the number of its rows, padding included."""
        late = unread.take(requests, end, self.states.all_token_ids.gpu)
        self.read_late(late)
        return len(late.place)

    @cached_property
    def late_slots(self) -> Tensor:
        """Buffer for slots: vLLM's own has those of the step."""
        return torch.empty_like(self.block_tables.slot_mappings)

    def waiting_room(self, target: TargetOutput) -> UnreadStates:
        """What waits; made while vLLM measures memory."""
        if self.unread is None:
            self.unread = UnreadStates(self.max_num_reqs, states_of(target), rows=self.max_num_tokens)
        return self.unread
