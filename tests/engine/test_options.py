"""Options that an engine sets by what it measures, on each model runner: they do something that can be seen.

The others: `tests/pure/test_options.py`.
"""

import importlib
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.forward_context import get_forward_context

from tests.engine.engines import DRAFT, PROMPTS, V2, Engines, generate, keep_costs, runner_of, set_costs, tree
from vllm_adaptive_tree.bench.projection import read_hardware
from vllm_adaptive_tree.budget import Costs
from vllm_adaptive_tree.engine.startup import cost_profile
from vllm_adaptive_tree.engine.startup import finish as startup
from vllm_adaptive_tree.engine.startup.cost_profile import key_of
from vllm_adaptive_tree.engine.startup.finish import finish_startup
from vllm_adaptive_tree.engine.startup.measuring import MeasuredCosts
from vllm_adaptive_tree.proposers.dyspec import MIN_THRESHOLD
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE

profile = importlib.import_module(f"vllm_adaptive_tree.engine.{'v2' if V2 else 'v1'}.startup_costs")
NODES = 12
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
COSTS: dict[str, Any] = {
    "verify": {"rows": [1, 300], "seconds": [0.5, 0.6]},
    "draft": {"rows": [1, 12], "seconds": [1e-3] * 2},
}


class Measures:
    """Of no forward."""

    def __init__(self, disturbance: float = 1.0) -> None:
        self.asked: list[str] = []
        self.disturbance = disturbance

    def measured_threshold(self, runner: Any, nodes: int) -> float:
        self.asked.append("threshold")
        return 0.31

    def measured_costs(self, runner: Any, nodes: int) -> MeasuredCosts:
        self.asked.append("costs")
        return MeasuredCosts(Costs.from_json({**COSTS, "context": 0.0}), self.disturbance)


def test_dyspec_fills_its_trees(engines: Engines) -> None:
    """By their size before the budget's cut: a budget of one request's third is no reason to draft whole heaps."""
    config = {"method": "dyspec", "model": DRAFT, "num_speculative_tokens": NODES, "tree": {"budget": 4}}
    llm = engines.start(config)
    proposer, grown = runner_of(llm).steering.proposer, []
    assert proposer.threshold == 1 / NODES
    steer = proposer.steer
    proposer.steer = lambda fill: (grown.append(fill), steer(fill))
    generate(llm, PROMPTS[:2], GREEDY)
    assert len(grown) > 15
    assert proposer.threshold != 1 / NODES
    assert proposer.threshold > 100 * MIN_THRESHOLD, "trees of which the budget keeps a third are no small ones"
    assert 0.4 < sum(grown[-10:]) / 10 < 1.0


@pytest.mark.skipif(V2, reason="graphs are captured there")
@pytest.mark.parametrize("budget", ["auto", None])
def test_every_number_of_rows_of_a_first_tree_has_run(
    budget: str | None, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the engine has started: none of its steps is the first of a size, which would build kernels."""
    ran: dict[str, set[int]] = {"target_forward": set(), "draft_level": set()}

    def recorded(name: str) -> Any:
        made = getattr(profile, name)

        def prepare(model: Any, rows: int, *rest: Any) -> Any:
            run = made(model, rows, *rest)
            return lambda: (run(), ran[name].add(rows))

        return prepare

    for name in ran:
        monkeypatch.setattr(profile, name, recorded(name))
    engines.start(tree(4, budget=budget), max_num_seqs=3)
    assert ran["draft_level"] >= set(range(1, 1 + 4))
    assert ran["target_forward"] >= set(range(1, 1 + 3 * 5))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "costs.json"


@pytest.fixture(scope="module")
def llm(engines: Engines, file: Path) -> Any:
    """An OPT-Tree with every default, after some steps."""
    with pytest.MonkeyPatch.context() as patch:
        set_costs(patch, **COSTS)
        llm = engines.start(tree(NODES, budget="auto", cost_profile=str(file)))
    keep_costs(llm)
    generate(llm, PROMPTS[:4], GREEDY)
    return llm


def test_opt_trees_price_floor_and_temperature(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`threshold` null, `draft_temperature` "auto" and `budget` "auto"."""
    runner = runner_of(llm)
    planner, steering = runner.budget.budget, runner.steering
    price, told = steering.price, []
    monkeypatch.setattr(
        steering,
        "price",
        lambda *sizes: (price(*sizes), told.append((steering.proposer.threshold, steering.proposer.floor, sizes))),
    )
    generate(llm, PROMPTS[:4], GREEDY)
    assert any(threshold > 0 for threshold, _, _ in told), f"no level had a price: {told}"
    assert any(floor > float("-inf") for _, floor, _ in told), f"nobody told it what the batch verifies: {told}"
    assert runner.budget.greedy_temperature != GREEDY_DRAFT_TEMPERATURE
    assert sum(one.observed for one in planner.calibrations) > 10


def test_a_threshold_is_measured_once(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, measures = runner_of(llm), Measures()
    options = replace(
        runner.options, tree=replace(runner.options.tree, threshold="auto", budget=None, cost_profile=None)
    )
    monkeypatch.setattr(runner, "options", options)
    monkeypatch.setattr(runner.steering, "steered", options.tree.steered)
    before = runner.steering.proposer.threshold
    finish_startup(runner, 0, measures)
    assert measures.asked == ["threshold"]
    assert runner.steering.proposer.threshold == 0.31
    runner.steering.proposer.threshold = before


BEGUN: list[Any] = []
"""Arguments with which the last engine that `settled` began."""


def settled(
    runner: Any, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, disturbance: float = 1.0, **options: Any
) -> list[str]:
    """Names of the numbers that an engine with these options would measure; the engine is unchanged afterwards."""
    measures, profile = Measures(disturbance), runner.profile
    with monkeypatch.context() as patch:
        patch.setattr(runner, "begin_budget", lambda *learnt: BEGUN.append(learnt))
        patch.setattr(runner, "options", replace(runner.options, tree=replace(runner.options.tree, **options)))
        finish_startup(runner, rank, measures)
    runner.profile = profile
    return measures.asked


def test_what_was_learnt_is_kept_and_read(llm: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(llm)
    runner.profile.due = 0.0
    generate(llm, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=3))
    written = json.loads(file.read_text())
    assert written["key"] == key_of(runner.vllm_config, runner.options)
    assert written["learnt"]["temperature"]["inverse"] != pytest.approx(1 / GREEDY_DRAFT_TEMPERATURE)
    assert settled(runner, monkeypatch) == [], "all of it was in the file"
    planner, temperature = BEGUN.pop()
    assert planner.costs.to_json() == written["costs"]
    assert planner.to_json() == written["learnt"]["planner"]
    assert temperature.to_json() == written["learnt"]["temperature"]


def test_a_cost_file_is_where_it_begins(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `vllm-adaptive-tree costs`: nothing is measured, the rest is learnt, and `bench --project` still reads it."""
    runner, file = runner_of(llm), tmp_path / "costs.json"
    costs = {**COSTS, "context": 0.0}
    file.write_text(json.dumps({"name": "a machine", "step": 0.25, "costs": costs}))
    cost_profile.check_folder(str(file))
    assert settled(runner, monkeypatch, cost_profile=str(file)) == []
    planner, _ = BEGUN.pop()
    assert planner.costs.to_json() == costs
    assert planner.to_json()["overhead"] == {"drafting": [], "plain": []}
    hardware, written = read_hardware(file), json.loads(file.read_text())
    assert (hardware.name, hardware.step, hardware.costs.to_json()) == ("a machine", 0.25, costs)
    assert written.keys() == {"key", "name", "step", "costs", "learnt"}
    assert settled(runner, monkeypatch, cost_profile=str(file)) == []
    assert json.loads(file.read_text())["name"] == "a machine"


def test_another_rank_hears_what_rank_0_has_read(llm: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node where the file is another one, it looks at none."""
    runner = runner_of(llm)
    runner.profile.write()
    read = json.loads(file.read_text())
    file.write_text("of this node")
    passed: list[Any] = []
    monkeypatch.setattr(startup, "object_from_rank_0", lambda mine: (passed.append(mine), read)[1])
    assert settled(runner, monkeypatch, rank=1) == []
    planner, _ = BEGUN.pop()
    assert planner.costs.to_json() == read["costs"]
    assert planner.to_json() == read["learnt"]["planner"]
    assert passed == [None]
    assert file.read_text() == "of this node"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: '{"name": "of no key", "step": 0}',
        lambda text: text.replace('"opt_tree"', '"dyspec"'),
        lambda text: text.replace('"context": ', '"context": NaN, "was": '),
        lambda text: text.replace('"hits": [', '"hits": ["many", '),
        lambda text: text.replace('"trials": [', '"trials": [1e999, '),
        lambda text: text.replace('"overhead": {', '"overhead": [], "was": {'),
        lambda text: text.replace('"calibrations": [', '"calibrations": [[], '),
        lambda text: text.replace('"inverse": ', '"inverse": -'),
        lambda text: text.replace('"learnt": {', '"learnt": 7, "other": {'),
    ],
)
def test_what_is_no_profile_is_replaced(llm: Any, file: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(llm)
    runner.profile.write()
    good = file.read_text()
    file.write_text(change(good))
    assert file.read_text() != good
    said: list[str] = []
    monkeypatch.setattr(cost_profile.logger, "warning", lambda line, *args: said.append(line % args))
    assert settled(runner, monkeypatch) == ["costs"]
    assert len(said) == 1
    assert f"cost_profile {file} is ignored and replaced: " in said[0]
    assert json.loads(file.read_text())["costs"]["draft"] == COSTS["draft"]


def test_the_default_is_a_file_in_vllms_cache(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(llm)
    monkeypatch.setattr(cost_profile, "envs", SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path)))
    assert settled(runner, monkeypatch, cost_profile=None) == ["costs"]
    assert list(tmp_path.iterdir()) == [], "null keeps nothing"
    assert settled(runner, monkeypatch, cost_profile="auto") == ["costs"]
    (kept,) = (tmp_path / "adaptive_tree").iterdir()
    assert settled(runner, monkeypatch, cost_profile="auto") == []
    assert settled(runner, monkeypatch, cost_profile="auto", max_depth=3) == ["costs"], "other options, another key"
    assert len(list(kept.parent.iterdir())) == 2
    monkeypatch.setattr(cost_profile.envs, "VLLM_CACHE_ROOT", str(kept / "below a file"))
    assert settled(runner, monkeypatch, cost_profile="auto") == ["costs"], "it starts all the same"


def test_costs_of_a_busy_machine_are_not_kept(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, said = runner_of(llm), list[str]()
    monkeypatch.setattr(cost_profile, "envs", SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path)))
    monkeypatch.setattr(startup, "DISTURBED", 1.2)
    monkeypatch.setattr(startup.logger, "warning", lambda line, *args: said.append(line % args))
    for disturbance, kept in ((1.9, 0), (1.1, 1)):
        assert settled(runner, monkeypatch, disturbance=disturbance, cost_profile="auto") == ["costs"]
        assert len(list((tmp_path / "adaptive_tree").glob("*.json"))) == kept
    assert len(said) == 1
    assert "forwards took 1.9 times their CPU time" in said[0]


def test_a_machine_that_is_too_slow_for_a_whole_profile(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up after the first forward; the engine starts all the same."""
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    with torch.inference_mode():
        costs = profile.measured_costs(runner_of(llm), NODES).costs
    assert costs.verify.rows.tolist() == [1, 2]
    assert costs.verify.cost(8) > 0
    assert costs.draft is not None


@pytest.mark.skipif(not V2, reason="V1 runs no dummy")
def test_a_verification_is_timed_alone(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows count, so that experts route them, and differ; the draft that vLLM's dummy run has is left out, and the
    logits that it has not are there."""
    runner, rows, logits = runner_of(llm), list[torch.Tensor](), list[int]()
    compute = runner.model.compute_logits
    drafted = list[Any]()

    def seen(*_: Any) -> None:
        rows.extend([get_forward_context().is_padding.clone(), runner.input_buffers.input_ids[:9].clone()])

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(runner.speculator, "dummy_run", lambda *_, **__: drafted.append(1))
    monkeypatch.setattr(runner.model, "compute_logits", counted)
    hook = runner.model.register_forward_pre_hook(seen)
    try:
        with torch.inference_mode():
            profile._target(runner, 9)()()
    finally:
        hook.remove()
    padding, tokens = rows
    assert padding.tolist() == 9 * [False]
    assert len(tokens.unique()) > 4
    assert logits == [9]
    assert not drafted
    assert not runner.speculator.off


@pytest.mark.skipif(not V2, reason="V1 times one forward after the other")
def test_a_draft_is_timed_in_steps(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine, apart: what its levels take, and what they do not."""
    runner = runner_of(llm)
    speculator = runner.speculator
    monkeypatch.setattr(profile, "ROUNDS", 2)
    level, besides = profile._drafting(runner, 2)
    threshold = runner.steering.proposer.threshold
    read, grow, seconds = speculator.read, speculator.grow, 1.0
    grown = list[int]()

    def slow_read(target: Any) -> None:
        time.sleep(3 * seconds)
        read(target)

    def slow_grow(tokens: torch.Tensor, *rest: Any) -> Any:
        grown.append(len(tokens))
        time.sleep(seconds)
        return grow(tokens, *rest)

    monkeypatch.setattr(speculator, "read", slow_read)
    monkeypatch.setattr(speculator, "grow", slow_grow)
    slow, slow_besides = profile._drafting(runner, 2)
    assert slow - level == pytest.approx(seconds, rel=0.4)
    assert slow_besides - besides == pytest.approx(2 * seconds, rel=0.4), "the roots' level is read"
    assert grown[0] == 2
    assert runner.budget is speculator.budget is not None
    assert runner.steering.proposer.threshold == threshold
    assert not any(speculator.readback.steps), "nothing is learnt from these trees"
    assert runner.stats.before is runner.stats.grown is None, "nor are they counted"


def test_a_file_that_cannot_be_written_later(llm: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding goes on, with one warning, and the file is tried again."""
    kept, said = runner_of(llm).profile, []
    monkeypatch.setattr(cost_profile.logger, "warning", lambda line, *args: said.append(line % args))
    monkeypatch.setattr(kept, "path", file / "below")
    for _ in range(2):
        kept.due = 0.0
        generate(llm, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=3))
    (line,) = said
    assert "could not be written" in line
    kept.path, kept.due = file, 0.0
    file.unlink()
    generate(llm, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=3))
    assert file.exists()


def test_a_clock_that_jumps(llm: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day, back and forth by a day at every look: the same tokens, the profile when it is due, and no
    duration below 0."""
    wanted = [list(one.token_ids) for one in generate(llm, PROMPTS[:4], GREEDY)]
    kept, jumps = runner_of(llm).profile, itertools.cycle((-86_400, 86_400, 0))
    day = time.time
    monkeypatch.setattr(time, "time", lambda: day() + next(jumps))
    kept.due = time.monotonic() + 3600
    written = file.stat().st_mtime_ns if file.exists() else 0
    assert [list(one.token_ids) for one in generate(llm, PROMPTS[:4], GREEDY)] == wanted
    assert (file.stat().st_mtime_ns if file.exists() else 0) == written, "it is not due"
    seconds = [one for one in llm.get_metrics() if one.name == "vllm:adaptive_tree_phase_seconds"]
    assert seconds
    assert all(0 <= one.sum < 3600 for one in seconds)
    kept.due = 0.0


def test_a_shutdown_writes(engines: Engines, file: Path, llm: Any) -> None:
    """The last test with this engine."""
    file.unlink()
    engines.shutdown()
    assert json.loads(file.read_text())["learnt"]["planner"]["calibrations"]


@pytest.mark.parametrize("name", ["missing/costs.json", ".", "/proc/costs.json", "file/costs.json"])
def test_a_named_file_that_cannot_be_written(engines: Engines, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    config = tree(NODES, budget="auto", cost_profile=str(tmp_path / name))
    with pytest.raises(ValueError, match=r"\['tree'\]\['cost_profile'\]: .* cannot be written .*'auto'.*null"):
        engines.start(config)
