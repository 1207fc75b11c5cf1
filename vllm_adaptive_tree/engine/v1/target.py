"""The target's distributions and draws at the nodes of the trees, through vLLM's own sampler."""

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_adaptive_tree.engine.common.request_flags import GREEDY
from vllm_adaptive_tree.engine.v1.verification import Verification

Choose = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""(p [R, V], vLLM's own sample from it -> [R]) -> tokens [R]."""


class Target:
    """The logits of one verification, sampled node by node.

    Each call samples the whole batch, because the sampler's processors are laid out by batch row; only active rows use
    their generators. While the sampler runs, a request's history includes the path to its node. `close` removes that.
    """

    def __init__(self, sampler: Any, sampling: Any, logits: Tensor, step: Verification):
        self.sampler, self.sampling, self.logits, self.step = sampler, sampling, logits, step
        counts = [1 + len(step.trees[r]) if r in step.trees else 1 for r in range(len(step.row_start))]
        self.first = torch.tensor([*accumulate(counts[:-1], initial=0)])  # [R]: row of each request's root in `logits`
        self.written = [len(tokens) for tokens in sampling.output_token_ids]
        if (budgets := sampling.thinking_budget_state_holder) is not None and budgets.has_tracked_requests():
            budgets.commit(sampling.output_token_ids)

    def best(self) -> list[int] | None:
        """The argmax at every row, if the sampler would return it after any history: a greedy batch without logprobs,
        penalties, bans, biases and budgets."""
        own = self.sampling
        thinking = own.thinking_budget_state_holder
        if (
            own.all_greedy
            and own.max_num_logprobs is None
            and not own.logprob_token_ids
            and own.no_penalties
            and not own.bad_words_token_ids
            and own.allowed_token_ids_mask is None
            and (thinking is None or not thinking.has_tracked_requests())
            and not any(_may_act(one) for one in own.logitsprocs.non_argmax_invariant)
        ):
            best: list[int] = self.sampler.greedy_sample(self.logits.float()).tolist()
            return best
        return None

    def draw(self, node: Tensor, active: Tensor) -> Any:
        """vLLM's SamplerOutput after `node` [R] (-1: the root); inactive rows are undefined."""
        return self._sample(self.sampler, node, active)

    def draw_by(self, choose: Choose, node: Tensor, active: Tensor, *, greedy: bool = False) -> Any:
        """The same, but `choose` gives the tokens of random requests; with `greedy` of the others too, with the
        argmax as vLLM's own sample."""
        sampler, changed = copy.copy(self.sampler), {}
        if greedy:
            own = self.sampling.temperature
            own = torch.zeros(len(self.first)) if own is None else own
            best, of_all = own < GREEDY, choose
            choose = lambda p, draw: of_all(p, lambda: torch.where(best, p.argmax(-1), draw()))  # noqa: E731
            changed = {"temperature": own.masked_fill(best, 1.0), "all_greedy": False, "all_random": True}
        chooser = _Chooser(choose, self.sampler.topk_topp_sampler)
        sampler._modules = {**self.sampler._modules, "topk_topp_sampler": chooser}
        return self._sample(sampler, node, active, **changed)

    def probs(self, node: Tensor, active: Tensor, *, greedy: bool = False) -> Tensor:
        """p [R, V] of the next token after `node` [R], for random requests; with `greedy` for the others too, at
        temperature 1."""
        found = []

        def choose(p: Tensor, own: Callable[[], Tensor]) -> Tensor:
            found.append(p)
            return p.argmax(-1)

        self.draw_by(choose, node, active, greedy=greedy)
        return found[0]

    def _sample(self, sampler: Any, node: Tensor, active: Tensor, **changed: Any) -> Any:
        rows = torch.where(active, self.first + 1 + node, self.first)
        walking = active.nonzero().flatten().tolist()
        generators = {row: generator for row, generator in self.sampling.generators.items() if row in walking}
        if self.written:
            for row in walking:
                history = self.sampling.output_token_ids[row]
                history[self.written[row] :] = self._path(row, int(node[row]))
        sampling = copy.copy(self.sampling)  # `dataclasses.replace` asks every field
        for name, value in {"generators": generators, "spec_token_ids": [[] for _ in self.first], **changed}.items():
            setattr(sampling, name, value)
        return sampler(self.logits[rows], sampling)

    def _path(self, request: int, node: int) -> list[int]:
        if node < 0:
            return []
        tree = self.step.trees[request]
        return [tree.tokens[one] for one in tree.path_to(node)]

    def close(self) -> None:
        for history, length in zip(self.sampling.output_token_ids, self.written, strict=False):
            del history[length:]


def _may_act(processor: Any) -> bool:
    """Whether it may change this batch's logits; True for processors that are not vLLM's."""
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    return bool(processor.min_toks) if isinstance(processor, MinTokensLogitsProcessor) else True


def stacked(levels: list[LogprobsTensors]) -> LogprobsTensors | None:
    """The logprobs of all samples, [R * levels, ..], request by request."""
    if not levels:
        return None
    fields = (
        torch.stack(part, 1).flatten(0, 1) if part[0].numel() else part[0]
        for part in zip(*(level[:3] for level in levels), strict=True)
    )
    return LogprobsTensors(*fields)


class _Chooser(nn.Module):
    """Replaces vLLM's random sample, after its temperature, penalties, top-k and top-p."""

    def __init__(self, choose: Choose, original: Any):
        super().__init__()
        self.choose, self.original = choose, original

    def forward(
        self, logits: Tensor, generators: Any, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        unmasked = logits.clone()
        logits = apply_top_k_top_p(logits, top_k, top_p)
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        processed = {"processed_logits": logits, "processed_logprobs": logprobs}.get(self.original.logprobs_mode)
        token = self.choose(logprobs.exp(), lambda: self.original(unmasked, generators, top_k, top_p)[0])
        return token, processed
