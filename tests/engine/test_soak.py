"""A short soak; the long form is tests/engine/soak.py."""

from pathlib import Path

from tests.engine.engines import V2, Engines
from tests.engine.soak import ARGUMENTS, CONFIG, SMALL, Soak, pool, references

COUNT = 60 if V2 else 200


def test_soak(engines: Engines, tmp_path: Path) -> None:
    requests = pool(tmp_path)
    expected = references(engines, requests)
    found = Soak(engines.start(CONFIG, **ARGUMENTS, **SMALL), requests, expected).run(COUNT)
    assert found["identical"] + found["ties"] + found["aborted"] == COUNT // 10 * 10
    assert found["ties"] <= 1
    assert min(found["aborted"], found["preempted"], found["prefix hits"], found["accepted"]) > 0
    assert found["MB"][-1] - found["MB"][3] < 64, "every wave of requests has come by then"
