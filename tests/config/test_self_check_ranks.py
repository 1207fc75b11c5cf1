"""A rank whose check raises does not leave the others waiting, and all come to the same verdict."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_adaptive_tree.engine.self_check import check, draws, model, ranks
from vllm_adaptive_tree.engine.self_check.model import CheckOutcome
from vllm_adaptive_tree.engine.self_check.verdict import Finding, Verdict

RANKS = 2


class Group:
    """Ranks that are threads."""

    def __init__(self) -> None:
        self.barrier, self.place, self.objects = threading.Barrier(RANKS, timeout=20), threading.local(), [None] * RANKS

    def objects_of_all(self, mine: Any) -> list[Any]:
        self.objects[self.place.rank] = mine
        self.barrier.wait()
        found = [*self.objects]
        self.barrier.wait()
        return found

    def run(self, *, light: bool) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}

        def rank(number: int) -> None:
            self.place.rank = number
            verdicts[number] = check.check(RUNNER, light=light)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [verdicts[number] for number in range(RANKS)]


RUNNER = SimpleNamespace(
    kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
    compilation_config=SimpleNamespace(static_forward_context={}),
    model_config=SimpleNamespace(get_vocab_size=lambda: 64),
    device=torch.device("cpu"),
)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    for module in (check, ranks):
        monkeypatch.setattr(module, "objects_of_all", group.objects_of_all)
    monkeypatch.setattr(draws, "check", lambda **_: Finding("draws", True, {}))
    return group


def break_rank(group: Group, number: int, result: Any) -> Any:
    def run(*_: Any, **options: Any) -> Any:
        if group.place.rank == number:
            raise RuntimeError("no kernel")
        return result

    return run


def test_a_part_of_one_rank_raises(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = CheckOutcome([Finding("model", True, {})], [[1, 2]])
    monkeypatch.setattr(model, "check", lambda runner: outcome)
    assert [verdict.failed for verdict in group.run(light=False)] == [[], []]
    monkeypatch.setattr(model, "check", break_rank(group, 0, outcome))
    assert [verdict.failed for verdict in group.run(light=False)] == [["model", "ranks"], ["ranks", "another rank"]]


def test_a_light_check_of_one_rank_raises(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "drawn", break_rank(group, 1, [1, 2]))
    assert [verdict.failed for verdict in group.run(light=True)] == [["ranks", "another rank"], ["draws", "ranks"]]
