"""Conditions of the alarm for a rejected draft, and causes found in a draft's files."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_adaptive_tree.drafters import DRAFT_KINDS
from vllm_adaptive_tree.engine.drafts import causes as rejection_causes
from vllm_adaptive_tree.engine.drafts.causes import Cause
from vllm_adaptive_tree.engine.metrics.acceptance_alarm import (
    HOTTEST,
    LOW,
    RECOVERED,
    REQUESTS,
    STEPS,
    AcceptanceAlarm,
    Window,
    is_telling,
)


class Alarmed:
    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.alarm = AcceptanceAlarm(self.windows.append)

    def see(self, accepted: int, of: int = STEPS, requests: int = REQUESTS) -> None:
        for step in range(of):
            self.alarm.see(str(step % requests), accepted=step < accepted)


FEW, SOME, MANY = int(LOW * STEPS), int(RECOVERED * STEPS), STEPS // 2


def test_it_sounds_once_and_ends_once() -> None:
    heard = Alarmed()
    heard.see(0, of=STEPS - 1)
    assert not heard.windows, "few steps say nothing"
    heard.see(0, of=1)
    for accepted in (0, FEW, SOME, MANY, SOME):
        heard.see(accepted)
    heard.see(FEW)
    assert heard.windows == [
        Window(STEPS, 0, low=True),
        Window(STEPS, MANY, low=False),
        Window(STEPS, FEW, low=True),
    ], "between the two shares nothing changes"


def test_a_good_draft_is_told_once() -> None:
    heard = Alarmed()
    for accepted in (MANY, FEW + 1, STEPS):
        heard.see(accepted)
    assert heard.windows == [Window(STEPS, MANY, low=False)]


def test_one_odd_text_says_nothing() -> None:
    heard = Alarmed()
    heard.see(0, of=2 * STEPS, requests=REQUESTS - 1)
    assert not heard.windows
    heard.alarm.see("another", accepted=False)
    assert heard.windows == [Window(2 * STEPS + 1, 0, low=True)]


def request(*, grammar: bool = False, **sampling: Any) -> Any:
    defaults = {"temperature": 0.0, "allowed_token_ids": None, "logit_bias": None}
    return SimpleNamespace(use_structured_output=grammar, sampling_params=SimpleNamespace(**defaults | sampling))


def test_requests_that_say_something_of_a_draft() -> None:
    assert is_telling(request())
    assert is_telling(request(temperature=HOTTEST))
    assert not is_telling(request(temperature=1.01 * HOTTEST))
    assert not is_telling(request(grammar=True))
    assert not is_telling(request(allowed_token_ids=[1]))
    assert not is_telling(request(logit_bias={1: 2.0}))


class Model(SimpleNamespace):
    def get_total_num_hidden_layers(self) -> int:
        return 28

    def get_vocab_size(self) -> int:
        return 100


NORMS = [f"midlayer.{norm}.weight" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
NORMS.append("norm.weight")


def config(folder: Path, tensors: dict[str, Any], *, lora: Any = None, **written: Any) -> Any:
    """vLLM's, as far as causes read it, with a draft in `folder`."""
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **written}))
    save_file(tensors, folder / "model.safetensors")
    common = {"revision": None, "trust_remote_code": False, "dtype": torch.bfloat16, "quantization": None}
    head = SimpleNamespace(**written)
    draft = Model(model=str(folder), hf_config=head, **common)
    target = Model(model="org/target", max_model_len=4096, skip_tokenizer_init=True, **common)
    return SimpleNamespace(
        model_config=target, speculative_config=SimpleNamespace(draft_model_config=draft), lora_config=lora
    )


def found(kind: str, config: Any) -> dict[str, Cause]:
    checks = DRAFT_KINDS[kind].causes
    return {one.what: one for one in rejection_causes.causes(config, checks)}


def norms(names: Iterable[str] = NORMS) -> dict[str, Any]:
    return {name: torch.ones(4) for name in names}


GOOD = {"eagle_aux_hidden_state_layer_ids": [2, 14, 25], "draft_vocab_size": 3}
D2T = {"d2t": torch.tensor([0, 4, 90])}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "layers": ({"eagle_aux_hidden_state_layer_ids": None}, norms() | D2T, "so vLLM takes [2, 14, 25] of 28"),
    "a norm is missing": ({}, norms(NORMS[1:]) | D2T, "have no input_layernorm"),
    "a norm is dropped": ({}, norms([*NORMS, "input_norm.weight"]) | D2T, "norm_before_fc"),
    "d2t with ids": ({}, norms() | {"d2t": torch.tensor([0, 5, 98])}, "d2t names 3 of 100 tokens"),
    "d2t twice": ({}, norms() | {"d2t": torch.tensor([1, 0, 90])}, "d2t names 2 of 100 tokens by 3"),
    "target": ({"speculators_config": {"verifier": {"name_or_path": "org/other"}}}, norms() | D2T, "'org/other'"),
    "length": ({"max_position_embeddings": 2048}, norms() | D2T, "is 2048, max_model_len 4096"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_head_comes_first(fault: str, tmp_path: Path) -> None:
    written, tensors, said = FAULTS[fault]
    first, *others = found("eagle3", config(tmp_path, tensors, **GOOD | written)).values()
    assert first.confirmed is True
    assert said in first.why
    assert len(others) == 2
    assert not any(one.confirmed for one in others)


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_causes, "MOST", 9)
    whole = norms([*NORMS, "input_norm.weight"]) | D2T
    written = {"norm_before_fc": True, "speculators_config": {"verifier": {"name_or_path": "/models/target"}}}
    one = found("eagle3", config(tmp_path, whole, **GOOD | written))
    assert [cause.confirmed for cause in one.values()] == [None, False, False, False, False, False]


def test_quantised_drafts_and_adapters(tmp_path: Path) -> None:
    own = config(tmp_path, norms(), lora=object())
    own.speculative_config.draft_model_config.quantization = "fp8"
    said = [(cause.what, cause.confirmed) for cause in found("model", own).values()]
    assert [what for what, yes in said if yes] == [rejection_causes.PRECISION[0], rejection_causes.ADAPTERS[0]]
    assert said[-1] == (rejection_causes.TOKENIZER[0], None), "its folder has none"


def test_every_kind_has_three_causes() -> None:
    kinds = [DRAFT_KINDS.load(path) for path in DRAFT_KINDS.built_in.values()]
    assert all(len({what for what, _ in kind.causes}) >= 3 for kind in kinds)


def test_what_a_check_cannot_read_is_not_known(tmp_path: Path) -> None:
    own = config(tmp_path, norms())
    own.speculative_config.draft_model_config.hf_config = None
    del own.model_config.max_model_len
    assert any("it cannot be checked (AttributeError" in str(one) for one in found("mtp", own).values())
