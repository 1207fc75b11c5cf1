"""Acceptance in place of vLLM's rejection sampler."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.common.request_flags import RequestFlags
from vllm_adaptive_tree.engine.v2.acceptance import accept
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.trees import TreeBatch


class TreeSampler:
    """Walks the trees of a step: with vLLM's own draws, or with the rule of the pair."""

    enable_adaptive_verification = False  # vLLM asks

    def __init__(self, sampler: Any, pair: Pair, *, levels: int, nodes: int, flags: RequestFlags):
        """
        Args:
            sampler: vLLM's Sampler of this runner.
            levels: the largest depth of a tree.
        """
        self.sampler, self.pair, self.levels, self.nodes, self.flags = sampler, pair, levels, nodes, flags
        self.step: Verification | None = None
        self.accepted: Accepted | None = None

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
        assert step is not None
        target = Target(self.sampler, logits, batch, step.tree, self.levels)
        tree = step.tree if invalid_drafts is None else _without(step.tree, invalid_drafts, target.root)
        rng = counter_rng(states.seeds.gpu[batch.idx_mapping], step.root, purpose=1)
        from_target = self.flags.from_target[batch.idx_mapping_np]
        accepted = accept(self.pair, target, tree, step.draft, rng, from_target, levels=self.levels)
        self.accepted = accepted
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


def _without(tree: TreeBatch, invalid: Tensor, root: Tensor) -> TreeBatch:
    """The trees without the nodes whose rows are `invalid`; nothing below them is accepted."""
    rows = root[:, None] + 1 + torch.arange(tree.tokens.shape[1], device=root.device)
    removed = invalid[rows.clamp(max=len(invalid) - 1)] & tree.valid
    return tree._replace(tokens=tree.tokens.masked_fill(removed, -1))
