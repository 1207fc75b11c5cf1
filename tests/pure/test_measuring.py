"""Forwards timed on a machine that other things keep busy."""

from functools import partial

import pytest
import torch

from vllm_adaptive_tree.engine.startup import measuring
from vllm_adaptive_tree.engine.startup.measuring import Times, fastest, fastest_on_rank_0

TRUE = [1.0, 2.0, 4.0]
WARM_UP = 1


class Machine:
    """Runs forwards of `TRUE` seconds; in the rounds `busy` (0 is the warming one) all take five times as long."""

    def __init__(self, *busy: int):
        self.busy, self.rounds, self.order = busy, 0, list[int]()

    def prepare(self, place: int) -> object:
        return partial(self.run, place)

    def run(self, place: int) -> float:
        self.order.append(place)
        slow = (len(self.order) - 1) // len(TRUE) in self.busy
        return TRUE[place] * (5 if slow else 1)

    def measured(self, rounds: int, **options: object) -> list[float]:
        forwards = [partial(self.prepare, place) for place in range(len(TRUE))]
        given = {"rounds": rounds, "seconds": 60.0, "least": 2, "timed": lambda forward: forward(), **options}
        return fastest(forwards, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("busy", [(), (1,), (3,), (1, 2), (2, 3), (1, 3)])
def test_one_quiet_round_is_enough(busy):
    assert Machine(*busy).measured(3) == TRUE


def test_rounds_are_interleaved():
    """A machine that is busy for a while slows all sizes alike, so their ratios stay."""
    machine = Machine(1, 2, 3)
    assert machine.measured(3) == [5 * one for one in TRUE]
    assert machine.order == [0, 1, 2] * (WARM_UP + 3)


def test_the_warming_round_does_not_count():
    class Warming(Machine):
        def run(self, place: int) -> float:
            return super().run(place) if len(self.order) >= len(TRUE) else super().run(place) / 100

    assert Warming().measured(2) == TRUE


def test_no_time_for_all():
    """Forwards that the warm-up round has not reached are left out, but for the least; no further round begins."""
    machine = Machine()
    assert machine.measured(5, seconds=0.0) == TRUE[:2]
    assert machine.order == [0, 1, 0, 1]


def test_ranks_that_must_agree_do_as_they_are_told():
    machine = Machine()
    assert machine.measured(5, seconds=0.0, sync_timeout=lambda timed_out: False) == TRUE
    assert machine.order == [0, 1, 2] * (WARM_UP + 5)


@pytest.mark.parametrize(
    ("ranks", "slower", "expected"),
    [(1, 1.0, TRUE), (1, 1.1, [1.1, 2.2, 4.4]), (1, 3.0, TRUE), (2, 3.0, [3.0, 6.0, 12.0])],
)
def test_a_thread_that_does_not_get_its_processor_is_timed_by_its_own_clock(ranks, slower, expected, monkeypatch):
    """Something else is busy in every round: wall-clock time passes faster than the thread's. A rank's thread sleeps
    while it waits for another's, and that is no disturbance."""
    clock = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(measuring.time, "thread_time", lambda: clock["cpu"])
    monkeypatch.setattr(measuring, "from_rank_0", lambda figures: figures)
    monkeypatch.setattr(measuring, "num_ranks", lambda: ranks)
    monkeypatch.setattr(measuring, "DISTURBED", 1.2)  # engine tests have another

    def forward(seconds: float) -> None:
        clock["wall"] += slower * seconds
        clock["cpu"] += seconds

    forwards = [partial(partial, forward, seconds) for seconds in TRUE]
    found = fastest_on_rank_0(forwards, rounds=3, seconds=1e9, least=3, device=torch.device("cpu"))
    assert found == Times(pytest.approx(expected), pytest.approx(slower if ranks == 1 else 1.0))
