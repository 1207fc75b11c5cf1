"""Times of work on a GPU."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS, FEWEST, SECONDS = 21, 3, 2.0
"""Of one call: after so many seconds and the fewest rounds the rest are left out."""


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """One call's time, the median over replays of a CUDA graph of all of them."""
    for call in calls:  # compiles
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def wall_microseconds(call: Callable[[], object]) -> float:
    """The same without a graph, launches included; on a CPU as well."""
    call()
    times = []
    for _ in range(ROUNDS):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        times.append((time.perf_counter() - began) * 1e6)
        if len(times) >= FEWEST and sum(times) > SECONDS * 1e6:
            break
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_bandwidth(device: str = "cuda", size: int = 1 << 30) -> float:
    """Bytes per microsecond, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device == "cpu":
        return 2 * size / wall_microseconds(lambda: target.copy_(source))
    return 2 * size / microseconds([lambda: target.copy_(source)] * 4)
