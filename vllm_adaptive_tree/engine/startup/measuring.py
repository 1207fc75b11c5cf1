"""Timing forwards when the engine starts, on a machine that may be busy with other things."""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from vllm_adaptive_tree.budget import Costs
from vllm_adaptive_tree.engine.common.ranks import from_rank_0, num_ranks

MIN_THRESHOLD, MAX_THRESHOLD = 0.05, 0.9

POINTS = 2
"""Fewest points of a curve that are measured, however long they take."""
MAX_ROWS = 256
"""Most rows of a measured verification."""
DISTURBED = 1.2
"""Wall-clock time over CPU time from which times are those of a machine that something else keeps busy."""


class Times(NamedTuple):
    seconds: list[float]
    disturbance: float
    """Wall-clock time over CPU time of the thread; 1 on a device, and with ranks, which sleep while they wait for each
    other. If it exceeds `DISTURBED`, `seconds` are CPU time."""


class MeasuredCosts(NamedTuple):
    costs: Costs
    disturbance: float  # as of `Times`
    drafting: float | None = None
    """Seconds of a step's drafting besides its levels; None: not measured."""


Prepare = Callable[[], Callable[[], Any]]
"""Prepares, untimed, and returns the forward to time."""


def threshold(ratio: float) -> float:
    """OPT-Tree's mu from the cost of a draft level in target forwards (arXiv 2406.17276), clamped."""
    return min(max(ratio, MIN_THRESHOLD), MAX_THRESHOLD)


@torch.inference_mode()
def fastest(
    forwards: Sequence[Prepare],
    *,
    rounds: int,
    seconds: float,
    least: int,
    sync_timeout: Callable[[bool], bool] = lambda timed_out: timed_out,
    timed: Callable[[Callable[[], Any]], float] | None = None,
) -> list[float]:
    """The smallest time in seconds of each forward over `rounds` rounds. Each round runs all of them once, so a
    disturbance slows all alike, and one quiet round is enough. A warm-up round is not counted.

    After `seconds` the warm-up round ends, and the forwards that it has not reached are left out (the first `least` are
    always kept), or no further round begins. `sync_timeout` makes all ranks agree on that. `timed` runs a forward and
    returns its seconds.
    """
    timed, started = timed or _timed, time.perf_counter()
    kept = run_once(forwards, seconds=seconds, least=least, sync_timeout=sync_timeout, run=timed)
    times = [float("inf")] * len(kept)
    for _ in range(rounds):
        times = [min(best, timed(prepare())) for best, prepare in zip(times, kept, strict=True)]
        if sync_timeout(time.perf_counter() - started > seconds):
            break
    return times


@torch.inference_mode()  # as vLLM's steps; weights of some models want gradients
def run_once(
    forwards: Iterable[Prepare],
    *,
    seconds: float,
    least: int = 0,
    sync_timeout: Callable[[bool], bool],
    run: Callable[[Callable[[], Any]], Any] = lambda forward: forward(),
) -> list[Prepare]:
    """Run forwards, at least so many, until `seconds` have passed; the ones that ran. All ranks agree on that by
    `sync_timeout`."""
    started, ran = time.perf_counter(), list[Prepare]()
    for prepare in forwards:
        run(prepare())
        ran.append(prepare)
        if sync_timeout(len(ran) >= least and time.perf_counter() - started > seconds):
            break
    return ran


def timeout_of_rank_0(device: torch.device) -> Callable[[bool], bool]:
    """Makes rank 0's answer to whether the time is over that of all ranks."""
    return lambda timed_out: bool(from_rank_0(torch.tensor(timed_out, dtype=torch.int64, device=device)))


def fastest_on_rank_0(
    forwards: Sequence[Prepare], *, rounds: int, seconds: float, least: int, device: torch.device
) -> Times:
    """Smallest times as of `fastest`, with the device idle before and after each forward; every rank runs them, and
    rank 0's seconds count."""
    cpu_seconds, on_cpu = list[float](), device.type == "cpu"
    bound_by_thread = on_cpu and num_ranks() == 1

    def timed(forward: Callable[[], Any]) -> float:
        begun = time.thread_time()
        passed = _timed(forward, lambda: None if on_cpu else torch.accelerator.synchronize())
        cpu_seconds.append(time.thread_time() - begun)
        return passed

    sync_timeout = timeout_of_rank_0(device)
    times = fastest(forwards, rounds=rounds, seconds=seconds, least=least, sync_timeout=sync_timeout, timed=timed)
    busy = [min(cpu_seconds[len(times) + place :: len(times)]) for place in range(len(times))]  # not of the warm-up
    disturbance = (
        median(wall / max(cpu, 1e-9) for wall, cpu in zip(times, busy, strict=True)) if bound_by_thread else 1.0
    )
    figures = [disturbance, *(busy if disturbance > DISTURBED else times)]
    disturbance, *agreed = from_rank_0(torch.tensor(figures, dtype=torch.float64, device=device)).tolist()
    return Times(agreed, disturbance)


def _timed(forward: Callable[[], Any], wait: Callable[[], Any] = lambda: None) -> float:
    wait()
    started = time.perf_counter()
    forward()
    wait()
    return time.perf_counter() - started
