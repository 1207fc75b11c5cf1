"""Rows of a verification: the host chooses the number of nodes to verify, the device selects them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.budget import top_nodes
from vllm_adaptive_tree.engine.common.batch_budget import place_values
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.vllm_api import reallocated
from vllm_adaptive_tree.kernels import selection
from vllm_adaptive_tree.kernels.selection import MOST_NODES


class NodeSelection:
    """Replaces vLLM's AdaptiveVerificationManager, with its methods.

    The scheduler's draft tokens only bound the trees. A batch verifies as many nodes as the budget allows, the most
    likely of all its requests; without a node it is vLLM's plain decode. Graphs are chosen by the rows that run.
    """

    def __init__(
        self,
        drafts: Drafts,
        query_start_loc: Tensor,
        budget: DeviceBudget | None,
        *,
        most_rows: int,
        by_place: bool,
        on_host: bool = False,
    ):
        """
        Args:
            drafts: of the speculator.
            query_start_loc: [requests + 1] int32, the runner's own.
            budget: None: as many nodes as `most_rows` hold.
            most_rows: of logits in a verification: vLLM's sampler takes no more at once, nor do the kernels of rules
                after it.
            by_place: True for trees of a shape: their nodes count by place, and not by value.
            on_host: the host divides the nodes evenly, and knows the rows of each request, as those of adapters.
        """
        self.most_rows, self.by_place, self.on_host = most_rows, by_place, on_host
        self.drafts, self.query_start_loc, self.budget = drafts, query_start_loc, budget
        self.nodes = 0  # of the step in preparation
        self.scheduled = self.num_other_tokens = np.zeros(
            0, dtype=np.int32
        )  # its draft tokens, and all others, by request

    def run(self, step: Any) -> Any:
        """The scheduler's `step` as vLLM runs it: one that verifies no node is a plain decode from the start. With a
        grammar the draft tokens stay, since its masks are of all of them."""
        drafts = step.scheduled_spec_decode_tokens
        if not drafts or step.has_structured_output_requests or self.most(len(step.num_scheduled_tokens)) != 0:
            return step
        tokens = {name: count - len(drafts.get(name, ())) for name, count in step.num_scheduled_tokens.items()}
        return replace(
            step,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
        )

    def most(self, requests: int) -> int:
        """Most nodes that a batch of so many requests verifies."""
        room = max(0, self.most_rows - requests)
        nodes = None if self.budget is None else self.budget.nodes
        return room if nodes is None else min(nodes, room)

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Number of tokens of the step."""
        self.nodes = drafts = sum(map(len, draft_tokens.values()))
        # Amid a prompt draft tokens are placeholders; all rows are where the host expects them.
        if not any(num_tokens_per_req[name] > 1 + len(tokens) for name, tokens in draft_tokens.items() if tokens):
            self.nodes = min(drafts, self.most(len(num_tokens_per_req)))
        return sum(num_tokens_per_req.values()) - drafts + self.nodes

    def compact_batch(
        self, num_draft_tokens_per_req: np.ndarray, num_scheduled_tokens: np.ndarray, cu_num_logits_np: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Host's view of the step: tokens of each request, and the first row of its logits. Only the sums are exact;
        without a node, or where the host divides them, all numbers are."""
        self.scheduled = num_draft_tokens_per_req
        self.num_other_tokens = num_scheduled_tokens - num_draft_tokens_per_req
        if self.nodes == 0:
            return self.num_other_tokens, np.arange(len(self.num_other_tokens) + 1, dtype=cu_num_logits_np.dtype)
        if self.nodes == self.scheduled.sum():
            return num_scheduled_tokens, cu_num_logits_np
        inside = np.arange(self.scheduled.max())[:, None] < self.scheduled
        taken = (inside & (np.cumsum(inside).reshape(inside.shape) <= self.nodes)).sum(0).astype(np.int32)
        if self.on_host:
            self.scheduled = taken
            cu_num_logits_np = np.append(0, np.cumsum(1 + taken)).astype(cu_num_logits_np.dtype)
        return self.num_other_tokens + taken, cu_num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Tensor) -> tuple[Any, ...]:
        """Device's view of the step: first row of each request's logits, first of its rows (both [R + 1] and more),
        nodes."""
        device, requests, everyone = idx_mapping.device, len(req_ids), self.nodes == self.scheduled.sum()
        if compiles(device):
            return self._by_kernels(idx_mapping, everyone=everyone)
        room = async_tensor_h2d(self.scheduled, device=device)
        kept = room if everyone else top_nodes(self._values(idx_mapping), room, self.nodes).int()
        logits = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        torch.cumsum(kept + 1, 0, out=logits[1:])
        self.query_start_loc[:1].zero_()
        num_other_tokens = async_tensor_h2d(self.num_other_tokens, device=device)
        torch.cumsum(kept + num_other_tokens, 0, out=self.query_start_loc[1 : requests + 1])
        self.query_start_loc[requests + 1 :].fill_(int(self.num_other_tokens.sum()) + self.nodes)
        return reallocated(logits, self.query_start_loc, self.nodes)

    def _by_kernels(self, request: Tensor, *, everyone: bool) -> tuple[Any, ...]:
        counts = np.stack([self.scheduled, self.num_other_tokens])
        kept, others = async_tensor_h2d(counts.astype(np.int32), device=request.device)
        if not everyone and self.scheduled.size * self.drafts.tree.tokens.shape[1] > MOST_NODES:
            kept = top_nodes(self._values(request), kept, self.nodes).int()
        elif not everyone:
            weight, place = self.drafts.tree.log_weight, self.drafts.place
            kept = selection.top_nodes(weight, place, request, kept, self.nodes, by_place=self.by_place)
        rows = int(self.num_other_tokens.sum()) + self.nodes
        logits = selection.row_starts(kept, others, self.query_start_loc, rows)
        return reallocated(logits, self.query_start_loc, self.nodes)

    def _values(self, request: Tensor) -> Tensor:
        place = self.drafts.place[request]
        tree = self.drafts.tree
        weight = (place_values(tree) if self.by_place else tree.log_weight)[place.clamp(min=0)]
        return weight.masked_fill((place < 0)[:, None], -torch.inf)

    def add_request(self, req_idx: int) -> None:
        """Do nothing; vLLM's manager keeps data of each request."""

    def record_confidences(self, confidence_probs: Tensor, input_batch: Any) -> None:
        """Do nothing; vLLM's manager learns from its speculator's confidence."""

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Return no batches; vLLM's manager measures steps of all sizes at start-up."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Do nothing; vLLM's manager keeps the costs of those steps."""


class NoNodes(NodeSelection):
    """Selection of an engine whose trees are off: every step is vLLM's plain decode."""

    def most(self, requests: int) -> int:
        return 0

    def _values(self, request: Tensor) -> Tensor:
        return torch.zeros(len(request), int(self.scheduled.max()), device=request.device)
