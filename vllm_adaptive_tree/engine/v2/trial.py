"""Requests of the start-up itself, run through the model runner's own steps, in the last blocks of the pool."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.targets.checks import attention_layers
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback

GREEDY: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class TrialStep(NamedTuple):
    """Result of one step."""

    logits: dict[str, Tensor]  # by request, [its rows, V] float32
    verification: Any  # None without trees


class Trial:
    """Context of such requests. At its end they are removed, and their blocks zeroed."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.end = self.lowest = runner.kv_cache_config.num_blocks
        self.alive: list[str] = []
        self.held: dict[str, tuple[list[int], ...]] = {}
        """Blocks of each request, by cache group."""
        self.requests: list[str] = []
        """Requests of the last step, in the order of its rows."""

    def __enter__(self) -> Self:
        """Suspend the budget: inside, every step drafts, and verifies all nodes unless it is told to verify fewer."""
        self.selection, self.budget = self.runner.adaptive_verification, self.runner.budget
        if self.selection is not None:
            self.selection.budget = None
        self.runner.budget = self.runner.speculator.budget = None
        self.record = self.runner.record
        self.runner.record = self.runner.speculator.record = None
        self.runner.kv_connector.set_disabled(True)
        self.threshold = self.runner.steering.proposer.threshold
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.execute_model_state = None  # of a step that an error has cut short
        self.finish(list(self.alive))
        if self.selection is not None:
            self.selection.budget = self.budget
        self.runner.budget = self.runner.speculator.budget = self.budget
        self.runner.record = self.runner.speculator.record = self.record
        self.runner.kv_connector.set_disabled(False)
        self._forget()
        for cache in self.runner.kv_caches:
            cache[self.lowest :] = 0

    def _forget(self) -> None:
        """Leave nothing that a live step would learn from, or count."""
        runner = self.runner
        runner.steering.proposer.threshold = self.threshold
        runner.speculator.readback, runner.stats.readback = AsyncReadback(), AsyncReadback()
        runner.stats.before = runner.stats.grown = None
        runner.stats.dead = 0

    def coarsest(self, *, draft: bool = False) -> torch.dtype:
        """Type that attention rounds to, the target's or the draft's: where a layer has K/V of 8 bits, FlashAttention 3
        multiplies its values with weights of 8 bits, and the tree kernel with wider ones."""
        drafts, layers = self.runner.speculator.draft_attn_layer_names, attention_layers(self.runner.vllm_config)
        own = (layer for name, layer in layers.items() if (name in drafts) == draft)
        of_8_bits = any(is_quantized_kv_cache(layer.kv_cache_dtype) for layer in own)
        dtype: torch.dtype = torch.float8_e4m3fn if of_8_bits else self.runner.dtype
        return dtype

    def room(self, length: int, *, more: int) -> int:
        """Most requests at once with a text of this length, and as many tokens more."""
        seats = len(self.runner.req_states.free_indices)
        return min(seats, (self.end - 1) // sum(self._sizes(length, more)))

    def begin(
        self, texts: dict[str, list[int]], *, more: int, sampling: Mapping[str, Mapping[str, Any]] = GREEDY
    ) -> None:
        """Read texts natively, sample a token after each, and draft. Each request may get `more` tokens.

        Args:
            sampling: parameters of requests that are not greedy.
        """
        for names in self._batches(texts, more):
            new = self._new({name: texts[name] for name in names}, more, sampling)
            self._run(new, {name: len(texts[name]) for name in names})

    def read(self, texts: dict[str, list[int]], last: dict[str, int], *, otherwise: bool = False) -> dict[str, Tensor]:
        """Read texts as plain causal sequences, in as many steps as they need.

        Recurrent layers read a prompt by another kernel than tokens that are verified, so their last rows come one by
        one, after a step of the rows before them.

        Args:
            last: number of rows at the end of each text whose logits [last, V] are returned.
            otherwise: True to read the last rows in another way: at once those of recurrent layers, and else in a step
                after that of the rows before them.
        """
        recurrent = bool(self.runner.model_config.is_hybrid)
        apart, most = recurrent != otherwise, 1 if recurrent else max(last.values())
        logits, begun = dict[str, Tensor](), self.end
        for names in self._batches(texts):
            batch = {name: texts[name] for name in names}
            new, counts = self._new(batch, 0), {name: len(text) for name, text in batch.items()}
            if not apart:
                logits |= self._run(new, counts, last={name: last[name] for name in names}, samples=False).logits
            else:
                done = {name: count - last[name] for name, count in counts.items()}
                self._run(new, done)
                parts: dict[str, list[Tensor]] = {name: [] for name in names}
                while left := {name: min(most, counts[name] - at) for name, at in done.items() if at < counts[name]}:
                    step = self._run(self._running({name: done[name] for name in left}), left, last=left)
                    for name, rows in step.logits.items():
                        parts[name].append(rows)
                        done[name] += len(rows)
                logits |= {name: torch.cat(rows) for name, rows in parts.items()}
            self.finish(names)
            self.end = begun
        return logits

    def read_to_root(self, texts: dict[str, list[int]]) -> Iterator[None]:
        """Read each text up to its last token, which the draft takes for the root; yields after each step."""
        begun = self.end
        for names in self._batches(texts):
            new = self._new({name: texts[name] for name in names}, 0)
            self._run(new, {name: len(texts[name]) - 1 for name in names})
            yield
            self.finish(names)
            self.end = begun

    def decode_beside(self, name: str, *, nodes: int, texts: dict[str, list[int]]) -> None:
        """Run one step of a running request with so many drafted nodes, beside new requests that read their texts."""
        step, new = self._running({name: len(self.text(name)) - 1}), self._new(texts, 0)
        step.scheduled_new_reqs = new.scheduled_new_reqs
        step.scheduled_spec_decode_tokens = {name: [0] * nodes}
        self._run(step, {name: 1 + nodes} | {other: len(text) for other, text in texts.items()})

    def decode(
        self, names: Sequence[str], *, nodes: int = 0, most: int | None = None, logits: bool = True
    ) -> TrialStep:
        """Run one step of running requests, with so many drafted nodes each.

        Args:
            logits: False to return none.
            most: nodes to verify of all trees together, if the engine selects them; None: all.

        Returns:
            The logits of all its rows; none if there is a limit.
        """
        step = self._running({name: len(self.text(name)) - 1 for name in names})
        if nodes:
            step.scheduled_spec_decode_tokens = {name: [0] * nodes for name in names}
        counts = dict.fromkeys(names, 1 + nodes)
        if most is None or self.selection is None:
            return self._run(step, counts, last=counts if logits else None)
        with swapped(self.selection, "most_rows", len(names) + most):
            return self._run(step, counts)

    def finish(self, names: Sequence[str]) -> None:
        step = SchedulerOutput.make_empty()
        step.finished_req_ids = set(names)
        self.runner.execute_model(step)
        self.alive = [name for name in self.alive if name not in names]
        if not self.alive:
            self.end = self.runner.kv_cache_config.num_blocks

    def index(self, name: str) -> int:
        """vLLM's index of a request."""
        return int(self.runner.req_states.req_id_to_index[name])

    def text(self, name: str) -> list[int]:
        """Tokens of a request, the last sampled one included."""
        states, index = self.runner.req_states, self.index(name)
        tokens: list[int] = states.all_token_ids.gpu[index, : int(states.total_len.gpu[index])].tolist()
        return tokens

    def _batches(self, texts: dict[str, list[int]], more: int = 0) -> Iterator[list[str]]:
        """Groups of requests, each as large as a step and the cache take."""
        runner, names, tokens, blocks = self.runner, list[str](), 0, 0
        for name, text in texts.items():
            own = sum(self._sizes(len(text), more))
            full = tokens + len(text) > runner.max_num_tokens or len(names) + len(self.alive) >= runner.max_num_reqs
            if names and (full or blocks + own >= self.end):
                yield names
                names, tokens, blocks = [], 0, 0
            names.append(name)
            tokens += len(text)
            blocks += own
        yield names

    def _sizes(self, length: int, more: int) -> list[int]:
        """Blocks of a text and what may follow it, in each cache group. The rows of a head's block have slots too."""
        ahead = max(self.runner.num_speculative_steps, self.runner.vllm_config.num_lookahead_tokens)
        tokens = min(length + more + 1 + ahead, self.runner.max_model_len)
        return [_num_blocks(group.kv_cache_spec, tokens) for group in self.runner.kv_cache_config.kv_cache_groups]

    def _new(
        self, texts: dict[str, list[int]], more: int, sampling: Mapping[str, Mapping[str, Any]] = GREEDY
    ) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        for name, text in texts.items():
            own: Mapping[str, Any] = sampling.get(name, {"temperature": 0.0, "seed": 0})
            held = tuple(map(self._take, self._sizes(len(text), more)))
            step.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=text,
                    mm_features=[],
                    sampling_params=SamplingParams(max_tokens=1 + more, **own),
                    pooling_params=None,
                    block_ids=held,
                    num_computed_tokens=0,
                    lora_request=None,
                    prefill_token_ids=text,
                )
            )
            self.alive.append(name)
            self.held[name] = held
        return step

    def _take(self, blocks: int) -> list[int]:
        if blocks >= self.end:
            raise ValueError(
                f"The KV cache of {self.runner.kv_cache_config.num_blocks} blocks is too small for the steps of the "
                "start; raise gpu_memory_utilization, or lower num_speculative_tokens"
            )
        self.end -= blocks
        self.lowest = min(self.lowest, self.end)
        return list(range(self.end, self.end + blocks))

    def _running(self, computed: dict[str, int]) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.scheduled_cached_reqs = running = CachedRequestData.make_empty()
        running.req_ids, running.num_computed_tokens = list(computed), list(computed.values())
        running.num_output_tokens, running.new_block_ids = [1] * len(computed), [None] * len(computed)
        return step

    def _run(
        self,
        step: SchedulerOutput,
        counts: dict[str, int],
        *,
        last: dict[str, int] | None = None,
        samples: bool = True,
    ) -> TrialStep:
        """Run a step. `counts`: rows of each request; `samples`: False to sample and draft nothing afterwards."""
        runner = self.runner
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = counts, sum(counts.values())
        step.num_spec_tokens_to_schedule = runner.num_speculative_steps
        runner.execute_model(step)
        state, verification = runner.execute_model_state, runner.step.verification
        batch, logits = state.input_batch, dict[str, Tensor]()
        self.requests = list(batch.req_ids)
        if last is not None:
            ends = batch.query_start_loc[1:].tolist()
            rows = [row for name, end in zip(batch.req_ids, ends, strict=False) for row in range(end - last[name], end)]
            row_logits = runner.model.compute_logits(state.hidden_states[rows]).float()
            logits = dict(zip(batch.req_ids, row_logits.split([last[name] for name in batch.req_ids]), strict=True))
        if samples:
            runner.sample_tokens(None)
        else:
            runner.execute_model_state = None
            runner.step.end()
        return TrialStep(logits, verification)


def _num_blocks(specification: Any, tokens: int) -> int:
    """Blocks of a request; a layer with a recurrent state has one more for each draft token."""
    drafts = getattr(specification, "num_speculative_blocks", 0)
    return int(-(-tokens // specification.block_size) + drafts)
