"""Where Model Runner V2 keeps the texts that look-ups search."""

from typing import Any

import pytest

from vllm_adaptive_tree.engine.v2 import token_history


@pytest.mark.parametrize(
    ("requests", "length", "dense"), [(256, 131_072, True), (1024, 131_072, True), (1024, 1 << 20, False)]
)
def test_texts_are_in_the_memory_of_the_device_up_to_a_size(
    requests: int, length: int, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_history, "RequestState", lambda **given: given)
    vllms: dict[str, Any] = {"vocab_size": 9, "use_dense_all_token_ids": False}
    made: Any = token_history.states_of_look_ups(max_num_reqs=requests, max_model_len=length, **vllms)
    assert made == {
        "max_num_reqs": requests,
        "max_model_len": length,
        "vocab_size": 9,
        "use_dense_all_token_ids": dense,
    }
