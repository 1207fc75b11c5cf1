"""An accepted path ends where vLLM would have stopped after its tokens one by one."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request

from vllm_adaptive_tree.engine.common.stops import delivered, may_stop

PATH = [50, 51, 50, 51, 50, 51, 77, 78]
CASES: dict[str, tuple[dict[str, Any], int, int]] = {  # parameters, max_model_len, delivered
    "no stop": ({}, 512, 8),
    "a stop token": ({"stop_token_ids": [77]}, 512, 7),
    "the first of two": ({"stop_token_ids": [78, 51]}, 512, 2),
    "max_tokens": ({"max_tokens": 6}, 512, 4),
    "a stop token before max_tokens": ({"max_tokens": 6, "stop_token_ids": [51]}, 512, 2),
    "max_model_len": ({}, 15, 3),
    "a repetition": (
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=2, min_count=3)},
        512,
        6,
    ),
}


def request(parameters: dict[str, Any]) -> Request:
    params = SamplingParams(**{"max_tokens": 100, **parameters})
    one = Request("name", list(range(100, 110)), params, None)
    one.append_output_token_ids([48, 49])
    return one


@pytest.mark.parametrize("name", CASES)
def test_delivered(name: str) -> None:
    parameters, max_model_len, expected = CASES[name]
    ours, theirs = request(parameters), request(parameters)
    assert delivered(ours, PATH, max_model_len) == expected
    assert may_stop(ours, PATH, max_model_len) == (expected < len(PATH))
    assert ours.num_output_tokens == 2
    assert ours.get_finished_reason() is None
    stops = []
    for token in PATH:
        theirs.append_output_token_ids(token)
        stops.append(check_stop(theirs, max_model_len))
    assert (stops.index(True) + 1 if any(stops) else len(PATH)) == expected
