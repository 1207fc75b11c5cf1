"""Loads of the benchmark's engine, with an engine of which each request takes as many steps as its prompt says."""

from typing import Any

from vllm_adaptive_tree.bench.offline import Offline
from vllm_adaptive_tree.bench.plan import Cell
from vllm_adaptive_tree.bench.request_timing import RequestTiming


class Steps(Offline):
    """Request k of prompt p emits token k in each of `lengths[p]` steps."""

    keep_tokens = True

    def __init__(self, lengths: list[int]):
        self.prompts: list[Any] = lengths
        self.left: dict[str, int] = {}
        self.most, self.started, self.repaired, self.engine = 0, 0, False, self  # type: ignore[assignment]

    def _add(self, prompt: int, cell: Cell) -> str:
        self.started += 1
        self.left[str(self.started)] = self.prompts[prompt]
        return str(self.started)

    def _step(self, running: dict[str, RequestTiming]) -> int:
        self.most = max(self.most, len(running))
        assert self.left.keys() == running.keys()
        for name in list(running):
            running[name].add([int(name)], float(self.started))
            self.left[name] -= 1
            if not self.left[name]:
                del running[name], self.left[name]
        return 0

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def _samples(self) -> Any:
        return iter(())


def test_a_full_load_ends_with_the_last_request_of_the_round():
    engine = Steps([2, 5, 3])
    cell = Cell("full", 2, requests=3)
    for _ in range(2):  # nothing is left behind
        before = engine.started
        found = engine.measure(cell, 0)
        names = [before + 1, before + 2, before + 3]
        assert found.token_steps == [[[names[0]]] * 2, [[names[1]]] * 5, [[names[2]]] * 3]
        assert engine.most == 2
        assert engine.left == {}
        assert found.tokens == 10, "two requests in each of five steps"


def test_those_that_follow_are_cut():
    engine = Steps([1, 4, 2])
    found = engine.measure(Cell("full", 3, requests=3), 0)
    assert [len(steps) for steps in found.token_steps] == [1, 4, 2]
    assert found.tokens == 12, "the load stayed full"
    assert found.decode_steps < 12
    assert engine.left == {}


def test_a_steady_load_runs_out():
    engine = Steps([1, 4, 2])
    found = engine.measure(Cell("offline", 3, requests=3), 0)
    assert found.tokens == 7
