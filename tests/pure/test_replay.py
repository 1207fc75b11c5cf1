"""The replay: recorded trees are cut, counted and timed right, and the budget comes near the best constant trees."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planner import replay
from benchmarks.planner.__main__ import main
from benchmarks.planner.policies import Fixed, StepPlan
from benchmarks.planner.recording import Recording, bundled
from benchmarks.planner.simulation import Machine, Row, Workload, expected, simulate
from vllm_adaptive_tree.budget import Curve

FILES = [*bundled(), *sorted((Path(__file__).parents[1] / "data" / "replay").glob("*.npz"))]

# root -> 0 (.8) -> 1 (.6) -> 3 (.3), root -> 2 (.5); the target goes 0, 1, and on by itself
PARENTS, VALUES, LAST = [-1, 0, -1, 1], [0.8, 0.6, 0.5, 0.3], 1
FLAT = Machine("flat", Curve([1, 1000], [1.0, 1000.0]), Curve([1, 1000], [0.25, 0.25]), 0.5)


def recording(*, sampled: bool = False, by_place: bool = False) -> Recording:
    """One stream a kind, the same tree in every step."""
    stream = [(PARENTS, VALUES, LAST)] * 3
    return Recording("hand-made", (sampled, by_place, not sampled), [False, True], [stream, stream])


def paths_of(plan: StepPlan, **traits: bool) -> tuple[list[float], list[int], list[bool], int]:
    value, depth, accepted, levels = recording(**traits).grow(np.array([0]), plan)
    size = int((depth > 0).sum())
    return value[0, :size].tolist(), depth[0, :size].tolist(), accepted[0, :size].tolist(), int(levels[0])


def test_trees_as_a_plan_would_have_drafted_them() -> None:
    assert paths_of(StepPlan([True])) == (VALUES, [1, 2, 1, 3], [True, True, False, False], 2)
    assert paths_of(StepPlan([True], levels=1)) == (VALUES[:3], [1, 2, 1], [True, True, False], 1)
    assert paths_of(StepPlan([True], levels=0)) == ([0.8, 0.5], [1, 1], [True, False], 0)
    assert paths_of(StepPlan([True], nodes=2, levels=0)) == ([0.8, 0.5], [1, 1], [True, False], 0)
    assert paths_of(StepPlan([True], nodes=2))[:3] == ([0.8, 0.6], [1, 2], [True, True])
    assert paths_of(StepPlan([True], chain=True)) == ([0.8, 0.6, 0.3], [1, 2, 3], [True, True, False], 2)
    assert paths_of(StepPlan([True], floor=math.log(0.7))) == (VALUES[:3], [1, 2, 1], [True, True, False], 1)
    assert paths_of(StepPlan([True], threshold=1.0)) == (VALUES[:3], [1, 2, 1], [True, True, False], 1)  # 1.3, then 0.6
    assert paths_of(StepPlan([True], threshold=1.3))[3] == 0


def test_sampled_trees_know_no_floor_and_no_threshold() -> None:
    assert paths_of(StepPlan([True], floor=0.0, threshold=9.0), sampled=True)[1:] == (
        [1, 2, 1, 3],
        [True, True, False, False],
        2,
    )
    assert paths_of(StepPlan([True], levels=0), sampled=True, by_place=True)[0] == [1.0, 0.5]


class Counting(Fixed):
    """Also counts what it is told."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.nodes_seen = self.hits = self.steps = self.rows = 0
        self.forwards: list[int] = []
        self.left: list[str] = []

    def share(self, requests: Any, value: Any, depth: Any, greedy: Any, seconds: Any, **others: Any) -> Any:
        self.forwards.append(len(seconds))
        return super().share(requests)

    def verified(self, value: Any, depth: Any, accepted: Any, *, greedy: bool) -> None:
        self.nodes_seen, self.hits = self.nodes_seen + len(value), self.hits + int(accepted.sum())

    def took(self, rows: int, *_: Any) -> None:
        self.steps, self.rows = self.steps + 1, self.rows + rows

    def forget(self, requests: Any) -> None:
        self.left += requests


def test_tokens_and_seconds_of_a_simulation() -> None:
    policy, row = Counting(3, 1), Row(recording(), Workload("2", (2,), 0.5), FLAT)
    run = simulate(row, policy, seed=0, steps=200)
    assert run.steps == policy.steps
    assert set(policy.forwards) == {2}
    assert run.tokens == 2 * run.steps + policy.hits  # the root's own token, and the accepted nodes
    assert policy.hits * 3 == policy.nodes_seen * 2  # 0 and 1 of 0, 1, 2
    assert policy.rows == 2 * run.steps + policy.nodes_seen
    assert run.seconds == pytest.approx(policy.rows + run.steps * (0.5 + 2 * 0.25))
    assert run.seconds == pytest.approx(200 * 2.5, abs=10)
    assert len(policy.left) == len({*policy.left}) >= run.tokens / 102 - 4


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_everything_kept_is_the_recorded_acceptance(file: Path) -> None:
    found = Recording.load(file)
    grown = found.grow(np.arange(len(found.value)), StepPlan((), nodes=found.value.shape[1]))
    assert (grown.depth > 0).sum() == (found.depth > 0).sum()
    assert grown.accepted.sum() == found.accepted.sum() > 0


@pytest.mark.parametrize("name", replay.CONSTANTS)
def test_what_is_expected_of_constant_trees_is_what_a_simulation_finds(name: str) -> None:
    row = Row(Recording.load(bundled()[0]), Workload("4", (4,), 0.5), replay.machines()[0])
    runs = [simulate(row, replay.CONSTANTS[name], seed=seed, steps=600) for seed in range(3)]
    assert np.mean([run.rate for run in runs]) == pytest.approx(expected(row, replay.CONSTANTS[name]), rel=0.04)


def test_no_drafts() -> None:
    row = Row(recording(), Workload("1, 3", (1, 3)), FLAT)
    run = simulate(row, Fixed(0), seed=0, steps=100)
    assert expected(row, Fixed(0)) == pytest.approx((1 / 1.5 + 3 / 3.5) / 2)
    assert run.rate == pytest.approx(expected(row, Fixed(0)), rel=0.02)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording().save(tmp_path / "some.npz")
    found = Recording.load(tmp_path / "some.npz")
    assert str(found) == str(recording())
    assert (found.parent == PARENTS).all()
    assert found.value == pytest.approx(np.tile(VALUES, (6, 1)), rel=0.03)
    assert (found.accepted == [True, True, False, False]).all()
    assert (found.sampled, found.by_place, found.priced, found.greedy) == (False, False, True, [False, True])


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.npz").write_text("no numbers")
    assert main([str(tmp_path / "some.npz")]) == 2
    assert "some.npz' is no recording of trees" in capsys.readouterr().err


def test_the_budget_is_near_the_best_constant_trees() -> None:
    load = Workload("swing half", (2, 32, 4), 0.5)
    rows = [
        row for row in replay.rows([Recording.load(file) for file in bundled()], [load]) if row.machine.off == (1, 1)
    ]
    results = replay.compare(replay.POLICIES, rows, seeds=1)
    assert all(result.oracle >= max(1.0, *result.constants.values()) for result in results)
    for name in replay.POLICIES:
        ratios = [result.rates[name][0] / result.oracle for result in results]
        assert np.exp(np.log(ratios).mean()) > 0.98, name
        assert min(ratios) > 0.93, name
    shown = replay.table(results)
    assert len(shown.splitlines()) == 1 + len(rows) + 2 * len(replay.POLICIES) + len(replay.CONSTANTS) + 1
