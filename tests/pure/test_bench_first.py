"""The first steps of a cold engine beside those of a warm one: what each begins with, and what is said of them."""

import json
from pathlib import Path

import pytest

from vllm_adaptive_tree.bench.first import COLD, LEARNING_ROUNDS, WARM, first_rows, measure_first
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.rounds import Measurement, Store

CELL = Cell("first", 2)
CONFIG = Config("opt_tree", "method", {"method": "opt_tree", "tree": {"budget": "auto"}})


class LearningEngine:
    """Its profile counts the rounds it has learnt from; each makes the next ones faster."""

    begun: list[int]

    def __init__(self, config: Config):
        assert config.speculation is not None
        assert config.speculation["tree"]["budget"] == "auto"
        self.file = Path(config.speculation["tree"]["cost_profile"])
        self.learnt = json.loads(self.file.read_text()) if self.file.exists() else 0
        self.begun.append(self.learnt)

    def measure(self, cell: Cell, number: int) -> Measurement:
        self.learnt += 1
        counts = {
            "decode_tokens": 0,
            "decode_steps": 0,
            "steps": 1,
            "drafts": 0,
            "nodes": 0,
            "accepted": 0,
            "memory": 0,
        }
        return Measurement(seconds=1.0, tokens=100 + 10 * (self.learnt - 1), time_per_token=[], **counts)

    def close(self) -> None:
        self.file.write_text(json.dumps(self.learnt))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(LearningEngine, "begun", [], raising=False)
    return LearningEngine.begun


def test_every_round_begins_anew(begun: list[int], tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out", {})
    measure_first(CELL, CONFIG, store, 5, LearningEngine, lambda: True)
    assert begun == [0, 0, LEARNING_ROUNDS, *(LEARNING_ROUNDS, 0, 0, LEARNING_ROUNDS) * 2], (
        "one that learns, then the two in turn"
    )
    (row,) = first_rows([CELL], [CONFIG], store.rounds)
    assert (row.rounds, row.cold.median, row.warm.median) == (5, 100, 100 + 10 * LEARNING_ROUNDS)
    assert row.to_cold is not None
    assert row.to_cold.median == pytest.approx(1 + 0.1 * LEARNING_ROUNDS)


def test_a_run_goes_on_where_it_stood(begun: list[int], tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out", {})
    left = iter([True, True, True, False])
    measure_first(CELL, CONFIG, store, 2, LearningEngine, lambda: next(left))
    assert [one.number for one in store.rounds] == [1], "a half round is none"
    assert set(store.rounds[0].measured) == {COLD, WARM}
    del begun[:]
    again = Store.open(tmp_path / "out", {})
    measure_first(CELL, CONFIG, again, 2, LearningEngine, lambda: True)
    assert begun == [LEARNING_ROUNDS, 0], "what was learnt is still there"
    measure_first(CELL, CONFIG, again, 2, LearningEngine, pytest.fail)
    assert len(again.rounds) == 2
