"""The capture rehearsal: what CUDA graphs are to hold is the same work, on the same addresses, in every step."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

from tests.engine import heads
from tests.engine.capture import Pieces
from tests.engine.engines import DRAFT, PROMPTS, Engines, generate, runner_of
from tests.examples.allocated import Allocated
from tests.pure.test_no_host_sync import HostSyncError
from vllm_adaptive_tree.engine.v2 import level_keys, verification
from vllm_adaptive_tree.engine.v2.attention import KernelTrees

pytestmark = pytest.mark.skipif(os.environ.get("MODEL_RUNNER") != "v2-kernels", reason="MODEL_RUNNER=v2-kernels")

CASES: dict[str, tuple[str, str, dict[str, Any], Callable[[Path], str]]] = {
    "opt_tree": ("opt_tree", "auto", {}, lambda folder: DRAFT),
    "adaptive_tree": ("adaptive_tree", "auto", {"max_children": 3}, lambda folder: DRAFT),
    "dyspec, rrsw": ("dyspec", "rrsw", {"threshold": 0.02, "max_children": 3}, lambda folder: DRAFT),
    "depth first": ("opt_tree", "auto", {}, lambda folder: DRAFT),
    "EAGLE-3": ("opt_tree", "auto", {"draft": "eagle3"}, heads.eagle3),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_a_step(engines: Engines, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, rule, options, draft = CASES[case]
    monkeypatch.setattr(verification, "IN_GENERATION_ORDER", 5 if case == "depth first" else 6)
    llm = engines.start(
        {
            "method": method,
            "model": draft(tmp_path),
            "num_speculative_tokens": 6,
            "rejection_sample_method": rule,
            "tree": {"budget": None, "max_depth": 3, **options},
        },
        max_num_seqs=4,
    )
    runner, pieces = runner_of(llm), Pieces(monkeypatch)
    step: dict[str, Any] = {}
    prepare = runner.prepare_attn

    def prepare_attn(batch: Any) -> Any:
        pieces.new_step()
        prepared = prepare(batch)
        step["key"] = (batch.num_reqs, batch.num_tokens, runner.step.verification is not None)
        return prepared

    monkeypatch.setattr(runner, "prepare_attn", prepare_attn)
    pieces.hold(
        runner.model, "forward", lambda **_: step["key"] if step["key"][2] else ("a prompt", len(pieces.graphs))
    )
    pieces.hold(runner.speculator.graphs, "run", lambda piece, _: (piece.num_reqs, piece.levels))
    for layer in runner.compilation_config.static_forward_context.values():
        pieces.inside(layer.impl, "forward")
    temperature = 0.0 if rule == "auto" else 0.8

    def sampled(*lengths: int) -> list[SamplingParams]:
        return [SamplingParams(temperature=temperature, seed=1, max_tokens=n, ignore_eos=True) for n in lengths]

    generate(llm, PROMPTS[:3], sampled(2, 2, 2))  # the largest trees make room for their logits, as vLLM's profile does
    pieces.graphs.clear()
    outputs = generate(llm, PROMPTS[:3], sampled(8, 8, 16))
    assert {*pieces.graphs} == {"forward", "run"}
    assert {key for key, _ in pieces.graphs["run"]} >= {(size, levels) for size in (1, 4) for levels in (0, 3)}
    for name, calls in pieces.graphs.items():
        again = 0
        first: dict[Any, list[Any]] = {}
        for key, record in calls:
            if key in first:
                again += 1
                assert _difference(first[key], record) is None, (name, key, _difference(first[key], record))
            first.setdefault(key, record)
        assert again >= 3, name
    check_whole_graph(runner)
    if case != "depth first":
        return
    plain = generate(engines.start(max_num_seqs=4), PROMPTS[:3], sampled(8, 8, 16))
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]


def check_whole_graph(runner: Any) -> None:
    """Check the metadata with which vLLM records the target in a whole graph: our kernel's, over persistent buffers."""
    sizes = runner.model_state, runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config
    recorded = prepare_inputs_to_capture(2, 8, *sizes, full_cudagraph=True, max_query_len=7).attn_metadata
    own = {name: one for name, one in recorded.items() if name not in runner.speculator.draft_attn_layer_names}
    assert len(own) > 1
    for one in own.values():
        assert isinstance(one, KernelTrees)
        assert one.ancestors is runner.attention.buffers.layout.bits
        assert one.context.data_ptr() == runner.attention.buffers.layout.context.data_ptr()


def _difference(one: list[Any], other: list[Any]) -> Any:
    """The first operation in which two records differ."""
    if len(one) != len(other):
        return len(one), len(other)
    return next((pair for pair in zip(one, other, strict=True) if repr(pair[0]) != repr(pair[1])), None)


class Work:
    """A piece that does something else in every call."""

    def __init__(self) -> None:
        self.calls, self.buffer, self.made = 0, torch.zeros(4), list[torch.Tensor]()

    def same(self) -> None:
        self.buffer.add_(torch.ones(4))

    def address(self) -> None:
        self.buffer.add_(self.made[self.calls])

    def shape(self) -> None:
        self.buffer[: self.calls].add_(1)

    def number(self) -> None:
        self.buffer.add_(self.calls)

    def waits(self) -> None:
        self.buffer.add_(self.buffer.sum().item())


@pytest.mark.parametrize("name", ["same", "address", "shape", "number"])
def test_the_rehearsal_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, work = Pieces(monkeypatch), Work()
    work.made = [torch.ones(4) for _ in range(3)]
    pieces.hold(work, name, lambda: 0)
    for _ in range(2):
        pieces.new_step()
        work.calls += 1
        getattr(work, name)()
    (_, first), (_, second) = pieces.graphs[name]
    assert (_difference(first, second) is None) == (name == "same")


def test_the_rehearsal_sees_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, work = Pieces(monkeypatch), Work()
    pieces.hold(work, "waits", lambda: 0)
    with pytest.raises(HostSyncError):
        work.waits()


@pytest.mark.parametrize(("method", "rule"), [("opt_tree", "auto"), ("dyspec", "rrsw")])
def test_the_memory_profile_has_seen_the_levels(
    engines: Engines, method: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"method": method, "model": DRAFT, "num_speculative_tokens": 6, "rejection_sample_method": rule}
    llm = engines.start({**config, "tree": {"budget": None, "max_depth": 3}}, max_num_seqs=4)
    speculator = runner_of(llm).speculator
    generate(llm, PROMPTS[:1], SamplingParams(max_tokens=1))  # vLLM's first forward comes before its profile of levels
    with torch.inference_mode(), Allocated() as profile:
        speculator.profile_levels()
    peaks, original = list[int](), speculator.trees
    # vLLM's own profile has seen the roots' forward. The kernel writes into its plan's buffers; the copies of Triton's
    # interpreter are not there on a device.
    monkeypatch.setattr(level_keys, "tree_attention", lambda *given, **_: given[8].zero_())

    def trees(*args: Any) -> Any:
        with Allocated() as allocated:
            found = original(*args)
        peaks.append(allocated.peak)
        return found

    monkeypatch.setattr(speculator, "trees", trees)
    generate(llm, PROMPTS[:4], SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True))
    assert profile.peak / 2 < max(peaks) <= profile.peak
