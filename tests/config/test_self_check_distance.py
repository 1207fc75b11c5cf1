"""How far two ways of computing the same logits may be from each other: by the K/V of the side that is judged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_adaptive_tree.engine.self_check import draft, waits
from vllm_adaptive_tree.engine.self_check.distance import allowed_error
from vllm_adaptive_tree.engine.v2 import device_draft, trial


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


@pytest.mark.parametrize("experts", [True, False])
def test_one_row_of_a_draft_with_experts_may_differ(experts: bool) -> None:
    """A rounding has chosen another expert."""
    config = SimpleNamespace(is_moe=experts)
    trial: Any = SimpleNamespace(
        runner=SimpleNamespace(speculator=SimpleNamespace(draft_model_config=config)),
        coarsest=lambda draft: torch.bfloat16,
    )
    native = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    mine, turned = native.clone(), native.flip(0)
    mine[3] += 5
    paths = {"a drafted": draft.Path(list(range(8)), list(mine), [])}
    read = {"a drafted": native}
    assert draft._compared(trial, 8, paths, read, read, {"a drafted": turned}).passed == experts
    mine[5] += 5
    paths = {"a drafted": draft.Path(list(range(8)), list(mine), [])}
    assert not draft._compared(trial, 8, paths, read, read, {"a drafted": turned}).passed


def test_batches_of_a_trial_fit_the_cache() -> None:
    """A request of a recurrent layer has a block for each draft token."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16, num_speculative_blocks=3))
    cache = SimpleNamespace(num_blocks=14, kv_cache_groups=[group])
    sizes = {"max_num_tokens": 1000, "max_num_reqs": 100, "num_speculative_steps": 3, "max_model_len": 40}
    seats = SimpleNamespace(free_indices=[0, 1, 2, 3])
    configured = SimpleNamespace(num_lookahead_tokens=0)
    check = trial.Trial(SimpleNamespace(kv_cache_config=cache, req_states=seats, vllm_config=configured, **sizes))
    texts = {str(number): [0] * 10 for number in range(7)}
    assert [len(names) for names in check._batches(texts)] == [3, 3, 1]
    assert [len(names) for names in check._batches(texts, more=3)] == [2, 2, 2, 1]
    assert (check.room(10, more=0), check.room(10, more=3)) == (3, 2)
    assert check._sizes(30, more=100) == [6], "no text is longer than the engine's"
    configured.num_lookahead_tokens = 20
    assert check._sizes(10, more=0) == [5], "a head's block of 20 is longer than the tree"
    configured.num_lookahead_tokens = 0
    assert [len(check._take(5)), len(check._take(5)), check.room(10, more=0)] == [5, 5, 0]
    with pytest.raises(ValueError, match="14 blocks is too small.*num_speculative_tokens"):
        check._take(4)


def test_what_the_start_runs_may_wait() -> None:
    """Its own steps read what they have done; those of a user may not."""
    assert not waits._counts(trial.__file__)
    assert not waits._counts(waits.__file__)
    assert waits._counts(device_draft.__file__)
    assert not waits._counts(torch.__file__)
