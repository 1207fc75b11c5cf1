"""Target's distributions and draws at the nodes of a verification, through vLLM's own sampler."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import Accepted, Draw
from vllm_adaptive_tree.engine.v2 import history, kernel_dispatch
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels import FUSED_RULES, FusedRNG
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.step import walked
from vllm_adaptive_tree.step.ports import Choose
from vllm_adaptive_tree.trees import TreeBatch


class Target:
    """Logits of one verification; row 1 + i of a request is its node i, row 0 its root.

    All rows are processed at once, unless that takes more memory than vLLM allows itself: then those of a level of the
    walk. vLLM's processors take a request's rows for a chain; those that read history (penalties, bad words, thinking
    budgets, processors of the user) get the path to each node instead (`history`).
    """

    def __init__(self, sampler: Any, logits: Tensor, batch: Any, tree: TreeBatch, levels: int):
        """`batch`: vLLM's InputBatch; `levels`: the largest depth of a tree."""
        self.sampler, self.logits, self.batch, self.tree, self.levels = sampler, logits, batch, tree, levels
        self.states = sampler.sampling_states
        self.root = batch.cu_num_logits[:-1].long()  # [R] row of each root
        self.positions = batch.positions[batch.logits_indices]
        self.tokens = batch.input_ids[batch.logits_indices]
        self.compiles = compiles(logits.device)
        branches = len(logits) > len(self.root)
        self.readers = history.readers(sampler, batch.idx_mapping_np) if branches else []
        """Processors of this batch that read history."""
        self.at_once = len(logits) <= get_max_chunk_logits(logits.shape[1])

    @property
    def rules(self) -> Mapping[Draw, Draw]:
        return FUSED_RULES if self.compiles else {}

    def draw(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """vLLM's samples after `node` [R], keyed by (seed, position)."""
        return self._drawn(node), torch.ones_like(active)

    def draw_by(self, choose: Choose, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.probs(node, active), lambda: self._drawn(node)), torch.ones_like(active)

    def probs(self, node: Tensor, active: Tensor) -> Tensor:
        """p [R, V] float32 after `node` [R]; of greedy requests at temperature 1."""
        return self._processed_after(node).softmax(-1, dtype=torch.float32)

    def proceed(self, active: Tensor) -> bool:
        return True

    def walk_at_once(self, verification: Verification) -> Accepted | None:
        if not self.compiles or not self.at_once:
            return None
        return kernels.walk(verification.tree, self.draws, self.root, levels=verification.levels)

    def rule_at_once(
        self, pair: Pair, verification: Verification, rng: RandomSource, active: Tensor | None
    ) -> Accepted | None:
        if not isinstance(rng, FusedRNG) or not self.at_once:
            return None
        by_kernel = kernel_dispatch.fused_traversal if pair.rule.draw is None else kernel_dispatch.fused_rejection
        return by_kernel(pair, self.processed, self.root, verification, rng, active)

    def emit(self, verification: Verification, paths: Accepted, from_target: Tensor | None) -> Accepted:
        if from_target is None:
            return paths
        walks = self.walk_at_once(verification) or walked(self.draw, self, verification)
        pairs = zip(walks, paths, strict=True)
        return Accepted(*(torch.where(from_target[:, None], walk, path) for walk, path in pairs))

    def logprobs(self, accepted: Accepted) -> LogprobsTensors | None:
        """Logprobs of the emitted tokens, [R * (D + 1), ..] request by request; None if no request asks for any."""
        dims = self.sampler.get_logprobs_dims(self.batch.idx_mapping_np)
        if dims is None:
            return None
        requests, length = accepted.tokens.shape
        where = torch.nn.functional.pad(accepted.nodes[:, :-1], (1, 0), value=-1).clamp(min=-1)  # sampled after these
        mode = self.sampler.logprobs_mode
        if mode in PROCESSED_LOGPROBS_MODES:
            logits = torch.stack([self._processed_after(node) for node in where.unbind(1)], 1).flatten(0, 1)
        else:
            logits = self.logits[(self.root[:, None] + 1 + where).flatten()]
        return compute_topk_scores(
            logits,
            dims[0],
            accepted.tokens.clamp(min=0).flatten(),
            list(range(0, (requests + 1) * length, length)),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=self.batch.idx_mapping.repeat_interleave(length),
            max_per_req_token_ids=dims[1],
            logits_mode=mode in ("raw_logits", "processed_logits"),
        )

    def _drawn(self, node: Tensor) -> Tensor:
        if self.at_once:
            return self.draws[self._row(node)]
        return self._sample(self._processed_after(node), self.batch.idx_mapping, self.positions[self._row(node)])

    def _row(self, node: Tensor) -> Tensor:
        return self.root + 1 + node

    def _processed_after(self, node: Tensor) -> Tensor:
        """Logits [R, V] after `node` [R], processed as before the sampler samples."""
        if self.at_once:
            return self.processed[self._row(node)]
        request = self.batch.idx_mapping
        return self._process(self._row(node), request, torch.zeros_like(request), node)

    def _process(self, rows: Tensor | slice, request: Tensor, local: Tensor, node: Tensor | None = None) -> Tensor:
        """Processed `rows` of the logits, which come `local` rows after the root of their `request`: those of `node`
        [R], or all."""
        sampler, batch = self.sampler, self.batch
        if self.readers:
            trees = self.tree.parent, self.tokens, batch.cu_num_logits, batch.idx_mapping, node
            windows = kernels.path_windows(*trees, levels=self.levels, nobody=sampler.req_states.max_num_reqs)
            sampler = history.along_paths(sampler, self.readers, windows)
        processed: Tensor = sampler.apply_sampling_params(
            self.logits[rows],
            request,
            batch.idx_mapping,
            batch.idx_mapping_np,
            self.positions[rows],
            self.tokens[rows],
            local.int(),
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        return processed

    @cached_property
    def processed(self) -> Tensor:
        """Logits of all rows [rows, V], processed as by `_processed_after`, if `at_once`."""
        return self._process(slice(None), self.batch.expanded_idx_mapping, self.batch.expanded_local_pos)

    @cached_property
    def draws(self) -> Tensor:
        """vLLM's samples after all rows [rows], if `at_once`."""
        return self._sample(self.processed, self.batch.expanded_idx_mapping, self.positions)

    def _sample(self, processed: Tensor, request: Tensor, positions: Tensor) -> Tensor:
        sampled: Tensor = gumbel_sample(
            processed,
            request,
            self.states.temperature.gpu,
            self.states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        return sampled.long()
