"""From arrivals, counters and other programs' load to a measurement."""

import os
import time

import pytest
import torch

from vllm_adaptive_tree.bench.background_load import BackgroundLoad
from vllm_adaptive_tree.bench.request_timing import Counters, RequestTiming, measurement
from vllm_adaptive_tree.bench.vllm_55005 import expand


def test_a_measurement_of_arrivals():
    one, other, none = RequestTiming(), RequestTiming(), RequestTiming()
    one.add([1], 1.0)
    one.add([2, 3, 4], 2.0)
    one.add([5], 3.0)
    other.add([1], 1.0)
    names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    seconds, steps = "vllm:adaptive_tree_phase_seconds_sum", "vllm:iteration_tokens_total_count"
    before = Counters.read([*((name, {}, 2.0) for name in names), (seconds, {"phase": "verify"}, 1.0)])
    after = Counters.read(
        [
            *zip(names, [{}] * 3, [6.0, 12.0, 6.0], strict=True),
            (seconds, {"phase": "verify"}, 1.5),
            (seconds, {"phase": "draft"}, 0.25),
            ("vllm:adaptive_tree_nodes_total", {"depth": "2"}, 3.0),
            (steps, {}, 9.0),
            ("vllm:other_total", {}, 5.0),
        ]
    )
    found = measurement([one, other, none], 4.0, after.since(before), 77, 0.5)
    assert (found.tokens, found.decode_tokens, found.decode_steps) == (6, 4, 2)
    assert found.time_per_token == [0.5], "a request of one token has none"
    assert (found.drafts, found.nodes, found.accepted, found.steps) == (4, 10, 4, 9)
    assert found.phases == {"verify": 0.5, "draft": 0.25}
    assert found.depths == {"2": 3}
    assert len(found.outputs) == 2
    assert found.outputs[0] != found.outputs[1]
    assert found.token_steps == []
    kept = measurement([one, other, none], 4.0, after.since(before), 77, 0.5, keep_tokens=True)
    assert kept.token_steps == [[[1], [2, 3, 4], [5]], [[1]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_the_repaired_expansion(dtype):
    values = torch.tensor([0, 7, 3]).to(dtype)
    found = expand(values, torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert found.tolist() == [1, 1, 3, 3, 3]
    assert found.dtype == dtype
    half = expand(torch.tensor([0.5, 0.7]), torch.tensor([1, 2]), 2, 0, 1)
    torch.testing.assert_close(half, torch.tensor([0.5, 0.7]))


def test_other_programs_are_seen():
    idle = BackgroundLoad([os.getpid()])
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        pass
    alone = idle.cores()
    busy = BackgroundLoad([])  # this process is one of the others now
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        pass
    assert busy.cores() > max(0.5, 0.5 * alone)
