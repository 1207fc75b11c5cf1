"""Rounds on disk."""

import pytest

from tests.pure.benches import measured
from vllm_adaptive_tree.bench.rounds import Round, Store


def test_rounds_come_back(tmp_path):
    store = Store.open(tmp_path / "out", {"model": "a", "chains": (1, 3)})
    added = Round("stage", "cell", 3, {"x": measured(5, phases={"verify": 0.1}, bursty={"1": [2, 0.5]})})
    store.add(added)
    again = Store.open(tmp_path / "out", {"model": "a", "chains": [1, 3]})
    assert again.rounds == [added]
    assert again.numbers("stage", "cell") == {3}
    assert again.numbers("stage", "other") == set()


def test_other_settings_are_refused(tmp_path):
    Store.open(tmp_path / "out", {"model": "a", "dtype": "auto"})
    with pytest.raises(ValueError, match=r"another run \(model: 'a' there, 'b' now\); give the same arguments"):
        Store.open(tmp_path / "out", {"model": "b", "dtype": "auto"})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is not empty and holds no settings.json; give another --out"):
        Store.open(tmp_path, {})
