"""Model Runner V2 as the engine of a `TreeStep`: the rows of its trees, the K/V of accepted nodes, and the figures."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.v2.verification import Verification


class DeviceEngine:
    """`step.Engine` of a `runner`."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.batch: Any = None
        """vLLM's InputBatch of this step."""

    def lay_out(self, batch: Any) -> Verification | None:
        runner, drafts = self.runner, self.runner.speculator.drafts
        self.batch, limits = batch, {"levels": runner.speculator.levels, "max_children": runner.pair.most}
        if (layout := runner.attention.layout) is not None:
            laid_out = Verification.laid_out(drafts, batch, layout, **limits)
            return laid_out if batch.num_draft_tokens else None
        if not batch.num_draft_tokens:
            return None
        verification = Verification.of(drafts, batch, **limits)
        if not verification.reads_only_roots(batch):
            verification = verification.plain
        verification.write_rows(batch.positions, batch.input_ids)
        batch.input_ids.clamp_(min=0)
        return verification

    def agreed(self, verification: Verification, accepted: Accepted) -> Accepted:
        """The same paths: every rank computes them from equal logits, which `observe` checks now and then."""
        return accepted

    def commit(self, verification: Verification, nodes: Tensor) -> None:
        self.runner.attention.commit(verification, nodes)

    def observe(self, verification: Verification, accepted: Accepted) -> None:
        runner, tree = self.runner, verification.tree
        if runner.budget is not None:
            greedy = runner.flags.greedy[self.batch.idx_mapping_np]
            runner.budget.verified(tree, accepted, greedy, verification.order)
            logits = verification.draft.logits
            if logits is not None and runner.budget.temperature is not None:
                temperature = runner.sampler.sampling_states.temperature.gpu[self.batch.idx_mapping]
                certain = (temperature == 0) & tree.valid.any(1)
                runner.budget.fit(logits[verification.draft.place, 0], accepted.tokens[:, 0], certain)
        drafts, place = runner.speculator.drafts, verification.draft.place
        if drafts.cell is not None:
            cell = drafts.cell[place.clamp(min=0)]
            if verification.order is not None:
                cell = cell.gather(1, verification.order)
            runner.acceptance.verified(tree, cell[:, : tree.tokens.shape[1]], accepted.nodes)
        runner.stats.verified(tree)
        runner.agreement.verified(tree, accepted)
        if runner.record is not None and runner.record.open:
            nodes = accepted.nodes
            if verification.order is not None:
                nodes = torch.where(nodes >= 0, verification.order.gather(1, nodes.clamp(min=0)), -1)
            decodes = self.batch.num_scheduled_tokens - verification.scheduled == 1
            roots, sizes = verification.root.tolist(), tree.valid.sum(1).tolist()
            runner.record.verified(self.batch.req_ids, decodes, roots, sizes, nodes, accepted.tokens, self._given)

    def observe_plain(self, output: Any) -> None:
        """Record a step without trees. `output`: vLLM's SamplerOutput."""
        record, batch = self.runner.record, self.batch
        if record is not None and record.open:
            roots = (batch.seq_lens[: batch.num_reqs] - 1).tolist()
            token = output.sampled_token_ids[:, :1]
            decodes, empty = batch.num_scheduled_tokens == 1, [0] * batch.num_reqs
            record.verified(batch.req_ids, decodes, roots, empty, torch.full_like(token, -1), token, self._given)

    def _given(self, row: int, start: int, end: int) -> list[int]:
        tokens = self.runner.req_states.all_token_ids.gpu[self.batch.idx_mapping[row], start:end]
        return [token for token in tokens.tolist() if token >= 0]
