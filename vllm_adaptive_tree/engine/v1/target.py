"""Target's distributions and draws at the nodes of the trees, through vLLM's own sampler."""

import copy
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_adaptive_tree.acceptance import Accepted, Draw
from vllm_adaptive_tree.acceptance.traversal import Traversal
from vllm_adaptive_tree.acceptance.traversal_cpu import Rows, traversal_of_rows
from vllm_adaptive_tree.engine.common.request_flags import GREEDY
from vllm_adaptive_tree.engine.v1.limits import Limits
from vllm_adaptive_tree.engine.v1.penalties import penalise
from vllm_adaptive_tree.engine.v1.processors import may_act, may_change_more, of_requests
from vllm_adaptive_tree.engine.v1.verification import NO_TREE, Verification
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import CounterRNG, RandomSource
from vllm_adaptive_tree.step import walked
from vllm_adaptive_tree.step.ports import Choose


class Target:
    """Logits of one verification, sampled node by node.

    Each call samples the whole batch, because the sampler's processors are laid out by batch row; only active rows use
    their generators. While the sampler runs, a request's history includes the path to its node. `close` removes that.
    """

    def __init__(
        self,
        sampler: Any,
        sampling: Any,
        logits: Tensor,
        step: Verification,
        limits: Limits,
        *,
        forces_greedy: bool = False,
    ):
        """`forces_greedy`: True if `draw_by` chooses the tokens of greedy requests too, with the argmax as vLLM's own
        sample."""
        self.sampler, self.sampling, self.logits, self.step = sampler, sampling, logits, step
        self.limits, self.forces_greedy = limits, forces_greedy
        self.drawn = 0
        """Tokens drawn for each request that still walks."""
        self.levels: list[LogprobsTensors] = []
        counts = [1 + len(step.trees[r]) if r in step.trees else 1 for r in range(len(step.row_start))]
        self.first = torch.tensor([*accumulate(counts[:-1], initial=0)])  # [R]: row of each request's root in `logits`
        self.written = [len(tokens) for tokens in sampling.output_token_ids]
        if (budgets := sampling.thinking_budget_state_holder) is not None and budgets.has_tracked_requests():
            budgets.commit(sampling.output_token_ids)

    @property
    def rules(self) -> Mapping[Draw, Draw]:
        return {}

    def proceed(self, active: Tensor) -> bool:
        return bool(active.any())

    def draw(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return self._emitted(self._sample(self.sampler, node, active))

    def draw_by(self, choose: Choose, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Draw as `draw`, but with tokens from `choose` for random requests."""
        return self._emitted(self._choose(choose, node, active))

    def probs(self, node: Tensor, active: Tensor) -> Tensor:
        """p [R, V] of the next token after `node` [R], for random requests; if it `forces_greedy` for the others too,
        at temperature 1."""
        rows = []

        def choose(p: Tensor, sample: Callable[[], Tensor]) -> Tensor:
            rows.append(p)
            return p.argmax(-1)

        self._choose(choose, node, active)
        return rows[0]

    def walk_at_once(self, verification: Verification) -> Accepted | None:
        """Follow the argmax of every row, if the sampler would return it."""
        if not self._is_argmax():
            return None
        best: list[int] = self.sampler.greedy_sample(self._all_penalised()).tolist()
        return verification.follow(best, self.first.tolist(), self.limits.most.tolist())

    def rule_at_once(
        self, pair: Pair, verification: Verification, rng: RandomSource, active: Tensor | None
    ) -> Accepted | None:
        if pair.rule is not Traversal or pair.proposer.kind != "without_replacement" or not isinstance(rng, CounterRNG):
            return None
        if self.forces_greedy or not self._has_rows():
            return None
        if active is None and not self.step.trees:
            roots = torch.zeros_like(self.first)
            tokens = rng.fold_in(roots).sample(self._distributions(self._all_penalised(), slice(None)))
            return Accepted(tokens[:, None], roots[:, None] - 1)
        walking = range(len(self.first)) if active is None else active.nonzero().flatten().tolist()
        rows = [self._rows(request, *verification.rows_of(request)) for request in walking]
        return traversal_of_rows(verification.tree, rows, rng, levels=verification.levels) if rows else None

    def _rows(self, request: int, size: int, q: Tensor, row: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Rows:
        """Distributions of a random request."""
        p = self._distributions(self._penalised(request), slice(request, request + 1))
        return Rows(request, p, q, row, chosen)

    def _distributions(self, logits: Tensor, requests: slice) -> Tensor:
        """Distributions [M, V] of random requests, as vLLM's sampler makes them of penalised `logits` [M, V], min-p,
        temperature, top-k and top-p; of one request, or of M with a row each."""
        sampling = self.sampling
        logits.div_(sampling.temperature[requests, None])
        for processor in sampling.logitsprocs.argmax_invariant:
            if may_act(processor):
                logits = of_requests(processor, requests).apply(logits)
        top_k, top_p = (
            None if limit is None else limit[requests].expand(len(logits)) for limit in (sampling.top_k, sampling.top_p)
        )
        return apply_top_k_top_p(logits, top_k, top_p).softmax(-1, dtype=torch.float32)

    def _penalised(self, request: int) -> Tensor:
        """Logits [1 + N, V] of a request's rows, each with the penalties of its path."""
        tree, first = self.step.trees.get(request, NO_TREE), int(self.first[request])
        rows = self.logits[first : first + 1 + len(tree)].to(torch.float32, copy=True)
        if not self.sampling.no_penalties:
            output = self.sampling.output_token_ids[request][: self.written[request]]
            penalise(rows, tree, self.sampling, request, output)
        return rows

    def _all_penalised(self) -> Tensor:
        if self.sampling.no_penalties:
            return self.logits.to(torch.float32, copy=True)
        return torch.cat([self._penalised(request) for request in range(len(self.first))])

    def emit(self, verification: Verification, paths: Accepted, from_target: Tensor | None) -> Accepted:
        """Draw the tokens of `paths` once more where vLLM's sampler draws itself, or gives logprobs of each."""
        if from_target is None and not self.limits.stops and not self._has_logprobs() and self._has_rows():
            return self.limits.cut(paths)
        self.drawn, self.levels = 0, []

        def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            level = self.drawn
            token = paths.tokens[:, level].clamp(min=0)
            choose: Choose = lambda p, sample: token  # noqa: E731
            if from_target is not None:
                choose = lambda p, sample: torch.where(from_target, sample(), token)  # noqa: E731
            token, goes_on = self.draw_by(choose, node, active)
            if level + 1 < paths.tokens.shape[1]:
                on_path = paths.tokens[:, level + 1] >= 0
                goes_on &= on_path if from_target is None else from_target | on_path
            return token, goes_on

        return walked(draw, self, verification)

    def logprobs(self) -> LogprobsTensors | None:
        """Logprobs of all emitted tokens, [R * levels, ..], request by request."""
        if not self.levels:
            return None
        fields = (
            torch.stack(part, 1).flatten(0, 1) if part[0].numel() else part[0]
            for part in zip(*(level[:3] for level in self.levels), strict=True)
        )
        return LogprobsTensors(*fields)

    def _is_argmax(self) -> bool:
        """Return whether every sample is the argmax of its row, with its penalties: a greedy batch without logprobs,
        bans, biases and budgets."""
        sampling = self.sampling
        return (
            sampling.all_greedy
            and not self._has_logprobs()
            and self._is_unbanned()
            and not any(map(may_act, sampling.logitsprocs.non_argmax_invariant))
        )

    def _has_logprobs(self) -> bool:
        return self.sampling.max_num_logprobs is not None or bool(self.sampling.logprob_token_ids)

    def _has_rows(self) -> bool:
        """Return whether `_rows` makes every distribution."""
        return self._is_unbanned() and not any(map(may_change_more, self.sampling.logitsprocs.all))

    def _is_unbanned(self) -> bool:
        """Return whether there are no bans and budgets."""
        sampling = self.sampling
        thinking = sampling.thinking_budget_state_holder
        return (
            not sampling.bad_words_token_ids
            and sampling.allowed_token_ids_mask is None
            and (thinking is None or not thinking.has_tracked_requests())
        )

    def _emitted(self, output: Any) -> tuple[Tensor, Tensor]:
        if output.logprobs_tensors is not None:
            self.levels.append(output.logprobs_tensors)
        self.drawn += 1
        tokens = output.sampled_token_ids[:, 0].long()
        return tokens, self.limits.go_on(self.drawn, tokens)

    def _choose(self, choose: Choose, node: Tensor, active: Tensor) -> Any:
        sampler, changed, by_rule = copy.copy(self.sampler), {}, choose
        if self.forces_greedy:
            temperature = self.sampling.temperature
            temperature = torch.zeros(len(self.first)) if temperature is None else temperature
            greedy = temperature < GREEDY
            by_rule = lambda p, sample: choose(p, lambda: torch.where(greedy, p.argmax(-1), sample()))  # noqa: E731
            changed = {"temperature": temperature.masked_fill(greedy, 1.0), "all_greedy": False, "all_random": True}
        chooser = _Chooser(by_rule, self.sampler.topk_topp_sampler)
        sampler._modules = {**self.sampler._modules, "topk_topp_sampler": chooser}
        return self._sample(sampler, node, active, **changed)

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
        return [tree.tokens[ancestor] for ancestor in tree.path_to(node)]

    def close(self) -> None:
        for history, length in zip(self.sampling.output_token_ids, self.written, strict=False):
            del history[length:]


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
