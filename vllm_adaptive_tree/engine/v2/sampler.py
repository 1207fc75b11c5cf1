"""Acceptance in place of vLLM's rejection sampler."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_adaptive_tree.engine.common.request_flags import RequestFlags
from vllm_adaptive_tree.engine.v2.requests import DeviceRequests
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.step import TreeStep


class TreeSampler:
    """Accepts the trees of a step."""

    enable_adaptive_verification = False  # vLLM asks

    def __init__(self, sampler: Any, step: TreeStep[Verification], flags: RequestFlags, *, nodes: int):
        """`sampler`: vLLM's Sampler of this runner; `nodes`: N."""
        self.sampler, self.step, self.flags, self.nodes = sampler, step, flags, nodes

    def __call__(
        self, logits: Tensor, batch: Any, draft_logits: Any = None, invalid_drafts: Tensor | None = None
    ) -> SamplerOutput:
        """
        Args:
            logits: [rows, V].
            batch: vLLM's InputBatch.
            draft_logits: of vLLM's own chains.
            invalid_drafts: [rows] bool: draft tokens that their grammar rejects, and all after them.
        """
        step, states = self.step, self.sampler.sampling_states
        verification = step.verification
        assert verification is not None
        target = Target(self.sampler, logits, batch, verification.tree, verification.levels)
        requests = DeviceRequests(self.flags, batch, states.seeds.gpu, verification.root)
        allowed = None if invalid_drafts is None else verification.allowed(invalid_drafts, target.root)
        accepted = step.accept(target, requests, allowed=allowed)
        count, rejected = get_num_sampled_and_rejected(
            (accepted.tokens >= 0).sum(1).int(),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=pad(accepted.tokens, (0, 1 + self.nodes - accepted.tokens.shape[1]), value=-1),
            logprobs_tensors=target.logprobs(accepted),
            num_nans=get_num_nans(logits) if self.sampler.compute_nans else None,
            num_sampled=count,
            num_rejected=rejected,
            sampling_mask_tensors=None,
        )
