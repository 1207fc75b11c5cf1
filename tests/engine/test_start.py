"""An engine at its start: what is stock without a tree method, what is measured, and the layers that are refused."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.engine import heads
from tests.engine.engines import PROMPTS, Engines, generate, runner_of, tree
from vllm_adaptive_tree.engine.common.attention import adopt_layers
from vllm_adaptive_tree.engine.targets import checks
from vllm_adaptive_tree.engine.v1 import runner as v1_runner


def test_asked_for_nothing_changes_nothing(engines: Engines) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner = runner_of(engines.start())
    assert type(runner) is CPUModelRunner
    layers = runner.compilation_config.static_forward_context.values()
    assert {type(layer.impl) for layer in layers} == {CPUAttentionBackendImpl}


def test_targets_outside_the_allow_list(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(engines.start())
    layer = next(iter(runner.compilation_config.static_forward_context.values()))
    checks.check_layer("layer.0", layer)
    for attribute, value, word in (
        ("sliding_window", 128, "sliding window"),
        ("sliding_window", (127, 0), "sliding window"),  # FlashAttention's form
        ("logits_soft_cap", 30.0, "soft-cap"),
        ("alibi_slopes", [1.0], "ALiBi"),
        ("sinks", [1.0], "sinks"),
    ):
        before = getattr(layer.impl, attribute)
        setattr(layer.impl, attribute, value)
        with pytest.raises(ValueError, match=word) as error:
            checks.check_layer("layer.0", layer)
        assert "layer.0" in str(error.value)
        if word != "ALiBi":
            checks.check_layer("layer.0", layer, plain=False)
        setattr(layer.impl, attribute, before)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "kv_cache_dtype", "fp8")  # as vLLM sets it where a checkpoint has a kv_cache_scheme
        with pytest.raises(ValueError, match="'layer.0' uses a KV cache of fp8"):
            checks.check_layer("layer.0", layer, plain=False)
        checks.check_layer("layer.0", layer, plain=False, caches=checks.FP8)
    monkeypatch.setattr(layer.impl, "sliding_window", (-1, -1))  # FlashAttention's form of none
    checks.check_layer("layer.0", layer)
    checks.check_packing({"layer.0": layer})
    with pytest.raises(ValueError, match="neon"):
        checks.check_packing({"layer.0": type("Layer", (), {"isa": "neon"})()})
    with pytest.raises(ValueError, match="Linear"):
        checks.check_layer("layer.0", type("Linear", (), {})())
    checks.check_window("layer.0", 9, levels=8)
    with pytest.raises(ValueError, match=r"layer.0.*window of 8 tokens.*at most 7"):
        checks.check_window("layer.0", 8, levels=8)


def test_threshold_auto_is_measured(engines: Engines) -> None:
    llm = engines.start(tree(8, threshold="auto"))
    runner = runner_of(llm)
    assert 0.05 <= runner.proposer.threshold <= 0.9
    assert runner.proposer.threshold != 0.5
    assert generate(llm, PROMPTS[:1], None)[0].token_ids


def test_no_handle_is_left_to_be_freed_while_torch_compiles(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM frees a dropped weight's by an operation that ends the process inside a trace; see `patches/README.md`."""
    from vllm._custom_ops import CPUDNNLGEMMHandler

    handles = list[int]()

    def count(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            handles.append(sum(isinstance(one, CPUDNNLGEMMHandler) for one in gc.get_objects()))
            gc.collect()
        adopt_layers(*args, **kwargs)

    monkeypatch.setattr(v1_runner, "adopt_layers", count)
    gc.disable()  # else it may have gone by chance
    try:
        engines.start(tree(8) | {"model": heads.eagle3(tmp_path)})
    finally:
        gc.enable()
    before, after = handles
    assert before == after > 0
