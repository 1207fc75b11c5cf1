"""How far two ways of computing the same logits may be from each other: by the K/V of the side that is judged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_adaptive_tree.engine.self_check import trial
from vllm_adaptive_tree.engine.self_check.distance import allowed_error


@pytest.mark.parametrize("of_8_bits", [(), ("target",), ("draft",), ("target", "draft")])
def test_k_v_of_8_bits_may_be_further(of_8_bits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layers: dict[str, Any] = {
        name: SimpleNamespace(kv_cache_dtype="fp8" if name in of_8_bits else "auto") for name in ("target", "draft")
    }
    monkeypatch.setattr(trial, "attention_layers", lambda config: layers)
    runner = SimpleNamespace(
        dtype=torch.bfloat16,
        vllm_config=None,
        kv_cache_config=SimpleNamespace(num_blocks=1),
        speculator=SimpleNamespace(draft_attn_layer_names={"draft"}),
    )
    check = trial.Trial(runner)
    for side, dtype in (("target", check.coarsest()), ("draft", check.coarsest(draft=True))):
        assert allowed_error(dtype, noise=0.0, peak=16.0) == (2.0 if side in of_8_bits else 0.5)
        assert allowed_error(dtype, noise=1.0, peak=16.0) == 3.0
