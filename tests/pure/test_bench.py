"""What is run together, when, and what the rounds say; engines are made up, times are a clock that is told."""

import argparse
import json
import os
import time
from itertools import islice
from pathlib import Path
from statistics import median as middle

import numpy as np
import pytest
import torch

from vllm_adaptive_tree.bench import loads, plan, results, statistics, tables
from vllm_adaptive_tree.bench.arrivals import Arrivals, Counters, measurement
from vllm_adaptive_tree.bench.costs import roofline, rows_up_to
from vllm_adaptive_tree.bench.others import Others
from vllm_adaptive_tree.bench.plan import BASE, Cell, Config
from vllm_adaptive_tree.bench.projection import project, read_costs
from vllm_adaptive_tree.bench.repair import expand
from vllm_adaptive_tree.bench.rounds import Measurement, Round, Store
from vllm_adaptive_tree.bench.schedule import Schedule
from vllm_adaptive_tree.cli.bench import _config, _list, _method, _rounds, cells
from vllm_adaptive_tree.cli.main import main

PLAIN = Config(BASE, "base", None)


def chain(tokens):
    return Config(f"chain {tokens}", "chain", {"method": "draft_model", "num_speculative_tokens": tokens})


def tree(name, budget="auto"):
    return Config(name, "method", {"method": "opt_tree", "num_speculative_tokens": 16, "tree": {"budget": budget}})


PROBE = Config("random draft", "probe", {"method": "opt_tree", "num_speculative_tokens": 16})


def measured(speed, outputs=("a",), **changes):
    values = {
        "seconds": 2.0,
        "tokens": int(speed * 2),
        "time_per_token": [0.1],
        "decode_tokens": 30,
        "decode_steps": 10,
        "steps": 12,
        "drafts": 8,
        "nodes": 40,
        "accepted": 20,
        "memory": 2**20,
        "outputs": list(outputs),
    }
    return Measurement(**{**values, **changes})


def rounds(stage, cell, **speeds):
    """Speeds by configuration, one per round."""
    return [
        Round(
            stage,
            cell.name,
            number,
            {name.replace("_", " "): measured(one[number - 1]) for name, one in speeds.items()},
        )
        for number in range(1, 1 + len(next(iter(speeds.values()))))
    ]


# ---- statistics


def test_median_of_a_known_sample():
    found = statistics.median(dict(enumerate([10.0, 12.0, 11.0, 30.0, 9.0])))
    assert found is not None
    assert (found.median, found.rounds) == (11.0, 5)
    assert 9 <= found.low < 11 < found.high <= 30
    assert found == statistics.median(dict(enumerate([10.0, 12.0, 11.0, 30.0, 9.0]))), "the seed is fixed"


def test_the_interval_covers_the_median_nine_times_in_ten():
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = statistics.median(dict(enumerate(generator.lognormal(0, 0.2, size=15))))
        assert found is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.82 <= hits / 200 <= 0.98


def test_a_ratio_is_of_rounds_that_ran_side_by_side():
    base = {number: 100.0 * drift for number, drift in enumerate([1, 0.2, 3, 0.5, 7, 2], 1)}
    ours = {number: 1.5 * speed for number, speed in base.items()}
    found = statistics.ratio(ours, base)
    assert found is not None
    assert [round(value, 9) for value in found[:3]] == [1.5, 1.5, 1.5], "the drift of the machine cancels"
    assert statistics.ratio(ours, {7: 1.0, **{n: base[n] for n in (1, 2, 3, 4)}}) is None, "four shared rounds"


@pytest.mark.parametrize("few", range(5))
def test_no_ratio_from_fewer_than_five_rounds(few):
    values = {number: 1.0 + number for number in range(few)}
    enough = {number: 1.0 + number for number in range(9)}
    assert statistics.ratio(values, enough) is None
    assert statistics.ratio_through(values, enough, enough, enough) is None
    assert statistics.ratio_through(enough, enough, values, enough) is None


def test_a_ratio_through_a_third():
    base, later = dict.fromkeys(range(5), 10.0), dict.fromkeys(range(5), 40.0)  # the machine became faster
    found = statistics.ratio_through(dict.fromkeys(range(5), 20.0), base, dict.fromkeys(range(5), 100.0), later)
    assert found is not None
    assert found[:3] == (0.8, 0.8, 0.8)


# ---- plan


@pytest.mark.parametrize("chains", [[], [3], [1, 3, 5], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("methods", range(4))
def test_never_more_than_three_engines_and_always_one_to_compare_with(chains, methods):
    configs = [PLAIN, *map(chain, chains), *(tree(f"tree {n}") for n in range(methods)), PROBE]
    groups = plan.groups(configs)
    for group in groups:
        only_chains = all(config.role == "chain" for config in group[1:])
        assert len(group) <= 3
        assert group[0].name == ("tree 0" if only_chains and methods and len(group) > 1 else BASE)
    others = [config.name for group in groups for config in group[1:]]
    assert sorted(others) == sorted(config.name for config in configs[1:]), "each of them once"
    if methods and 3 in chains:
        assert {config.name for config in groups[0][1:]} == {"tree 0", "chain 3"}


def test_stages_run_what_their_cells_ask_for():
    configs = [PLAIN, chain(3), tree("tree"), PROBE]
    wanted = [Cell("offline", 1), Cell("offline", 8, sampled=True), Cell("swing", 32), Cell("server", 1)]
    found = {stage.name: [cell.name for cell in stage.cells] for stage in plan.stages(configs, wanted)}
    assert found == {
        "offline: no speculation, tree, chain 3": ["offline 1 T=0", "offline 8 sampled", "swing 1-32 T=0"],
        "server: no speculation, tree, chain 3": ["server 1 T=0"],
        "offline: no speculation, random draft": ["offline 1 T=0"],
    }
    assert [stage.name for stage in plan.stages([PLAIN], wanted[:1])] == ["offline: no speculation"]


def test_which_configurations_are_fixed():
    assert PLAIN.fixed
    assert chain(3).fixed
    assert tree("tree", budget=8).fixed
    assert not tree("tree").fixed


# ---- loads


@pytest.mark.parametrize(("concurrency", "count"), [(1, 4), (2, 6), (3, 9), (32, 64), (100, 100)])
def test_every_round_has_prompts_of_its_own(concurrency, count):
    first, second = (loads.load([str(number) for number in range(200)], concurrency, number) for number in (0, 1))
    assert len(first) == len(second) == count
    assert len({*first, *second}) == 2 * count


def test_more_waves_are_more_requests():
    assert len(loads.load([str(number) for number in range(200)], 32, 1, waves=5)) == 160


def test_a_phase_of_a_swing_begins_with_its_own_prompts():
    prompts = [str(number) for number in range(400)]
    phases = [list(islice(loads.phase_prompts(prompts, 32, phase), 450)) for phase in (0, 1, 5)]
    assert [one[0] for one in phases] == ["0", "96", "80"]
    assert all(one[:50] == one[400:] for one in phases)


def test_standard_prompts():
    found = loads.standard()
    assert len(found) >= 100
    assert len(set(found)) == len(found)
    assert all(prompt.strip() for prompt in found)


# ---- measurement


def test_a_measurement_of_arrivals():
    one, other, none = Arrivals(), Arrivals(), Arrivals()
    one.add([1], 1.0)
    one.add([2, 3, 4], 2.0)
    one.add([5], 3.0)
    other.add([1], 1.0)
    names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    seconds, steps = "vllm:adaptive_tree_phase_seconds_sum", "vllm:iteration_tokens_total_count"
    before = Counters.read([*((name, {}, 2.0) for name in names), (seconds, {"phase": "verify"}, 1.0)])
    after = Counters.read(
        [
            *zip(names, [{}] * 3, [6.0, 12.0, 6.0], strict=True),
            (seconds, {"phase": "verify"}, 1.5),
            (seconds, {"phase": "draft"}, 0.25),
            ("vllm:adaptive_tree_nodes_total", {"depth": "2"}, 3.0),
            (steps, {}, 9.0),
            ("vllm:other_total", {}, 5.0),
        ]
    )
    found = measurement([one, other, none], 4.0, after.since(before), 77, 0.5)
    assert (found.tokens, found.decode_tokens, found.decode_steps) == (6, 4, 2)
    assert found.time_per_token == [0.5], "a request of one token has none"
    assert (found.drafts, found.nodes, found.accepted, found.steps) == (4, 10, 4, 9)
    assert found.phases == {"verify": 0.5, "draft": 0.25}
    assert found.depths == {"2": 3}
    assert len(found.outputs) == 2
    assert found.outputs[0] != found.outputs[1]


# ---- rounds on disk


def test_rounds_come_back(tmp_path):
    store = Store.open(tmp_path / "out", {"model": "a", "chains": (1, 3)})
    added = Round("stage", "cell", 3, {"x": measured(5, phases={"verify": 0.1}, swing={"1": [2, 0.5]})})
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


# ---- schedule


class Machine:
    """A clock, and engines that take one second per round and two to start."""

    def __init__(self, seconds_per_round=1.0):
        self.now, self.alive, self.most, self.log, self.second = 0.0, 0, 0, [], seconds_per_round

    def clock(self):
        return self.now

    def start(self, stage, config):
        self.alive += 1
        self.most = max(self.most, self.alive)
        self.now += 2
        if config.name == "broken":
            self.alive -= 1
            raise RuntimeError("it does not start")
        return Engine(self, config.name)


class Engine:
    def __init__(self, machine, name):
        self.machine, self.name = machine, name

    def measure(self, cell, number):
        self.machine.now += self.machine.second
        self.machine.log.append((cell.name, number, self.name))
        return measured(10)

    def close(self):
        self.machine.alive -= 1


class Progress:
    def __init__(self):
        self.done = 0

    def start(self, total):
        pass

    def update(self):
        self.done += 1

    def write(self, text):
        pass

    def say(self, text):
        assert "min at most" in text


CELLS = [Cell("offline", 1), Cell("offline", 8)]
CONFIGS = [PLAIN, chain(1), chain(3), tree("tree")]


def schedule(tmp_path, machine, seconds, configs=CONFIGS, cells=CELLS, rounds=5):
    store = Store.open(tmp_path / "out", {})
    return Schedule(plan.stages(configs, cells), store, rounds, seconds, machine.start, Progress(), machine.clock)


def test_rounds_are_interleaved(tmp_path):
    machine = Machine()
    run = schedule(tmp_path, machine, 1000)
    assert run.turns() == 5 * 2 * (3 + 2)
    run.run()
    assert run.turns() == 0
    assert run.progress.done == 50
    assert machine.most == 3
    assert machine.alive == 0
    names = {BASE, "tree", "chain 3"}
    first = machine.log[: 6 * 6]
    assert [(cell, number) for cell, number, _ in first[::3]] == [(c.name, n) for n in range(6) for c in CELLS]
    for start in range(0, 36, 3):
        assert {name for *_, name in first[start : start + 3]} == names
    leaders = {name for *_, name in first[::3]}
    assert leaders == names, "the order rotates"


def test_time_is_up_and_the_same_run_goes_on(tmp_path):
    machine = Machine()
    run = schedule(tmp_path, machine, 40)
    run.run()
    assert machine.now < 40 + 3 + 6, "no round of a cell begins later"
    done = len(run.store.rounds)
    assert 0 < done < 20
    assert machine.alive == 0
    machine.log.clear()
    again = schedule(tmp_path, machine, 1000)
    again.run()
    assert again.turns() == 0
    keys = [(one.stage, one.cell, one.number) for one in again.store.rounds]
    assert len(keys) == len(set(keys)) == 20, "none is repeated"
    idle = Machine()
    schedule(tmp_path, idle, 1000).run()
    assert not idle.log, "nothing is left to do, no engine starts"


def test_cells_that_do_not_fit_wait(tmp_path):
    """Whole cells, since a cell of three rounds gives no ratio."""
    machine = Machine()
    run = schedule(tmp_path, machine, 26, [PLAIN, chain(3), tree("tree")])
    run.run()
    by_cell = [len(run.store.numbers(run.stages[0].name, cell.name)) for cell in CELLS]
    assert by_cell == [5, 0]


def test_more_rounds_later(tmp_path):
    schedule(tmp_path, Machine(), 1000).run()
    more = schedule(tmp_path, Machine(), 1000, rounds=7)
    assert more.turns() == 2 * 2 * 5
    more.run()
    assert more.store.numbers(more.stages[0].name, CELLS[0].name) == set(range(1, 8))


def test_what_does_not_start_stops_no_other(tmp_path):
    machine = Machine()
    run = schedule(tmp_path, machine, 1000, [PLAIN, tree("tree"), chain(3), tree("broken"), chain(1)])
    run.run()
    assert list(run.failures.values()) == ["it does not start"]
    assert {one.stage for one in run.store.rounds} == {"offline: no speculation, tree, chain 3"}
    assert machine.alive == 0


# ---- results


CELL = CELLS[0]


def test_a_chain_beside_the_method_only():
    data = rounds("a", CELL, no_speculation=[100.0] * 5, tree=[200.0] * 5, chain_3=[160.0] * 5)
    data += rounds("b", CELL, tree=[20.0, 40.0, 20.0, 20.0, 10.0], chain_1=[22.0, 44.0, 22.0, 22.0, 11.0])
    found = {row.config: row for row in results.rows([CELL], CONFIGS, data)}
    assert found["chain 1"].to_base[0] == pytest.approx(2.2), "through the method"
    assert found["tree"].best_chain == "chain 1"
    assert found["tree"].to_best_chain[:3] == pytest.approx((1 / 1.1,) * 3), "of rounds side by side"
    assert found["chain 3"].to_best_chain[0] == pytest.approx(0.8 / 1.1)
    assert found["chain 1"].identical == 1, "with the base's of the same number"


def test_a_row_and_its_ratios():
    speeds = [100.0, 50.0, 200.0, 100.0, 100.0]
    data = rounds("a", CELL, no_speculation=speeds, tree=[2 * x for x in speeds], chain_3=[1.6 * x for x in speeds])
    data += rounds("b", CELL, no_speculation=[10.0] * 5, chain_1=[12.0] * 5)
    found = {row.config: row for row in results.rows([CELL], CONFIGS, data)}
    assert found["tree"].to_base[:3] == (2, 2, 2)
    assert found["tree"].to_best_chain[0] == pytest.approx(1.25)
    assert found["tree"].best_chain == "chain 3"
    assert found["chain 1"].to_best_chain[0] == pytest.approx(1.2 / 1.6), "through the base of its own rounds"
    assert found["chain 3"].to_best_chain is None
    assert found[BASE].to_base is None
    assert found[BASE].rounds == 10
    assert (found["tree"].tokens_per_step, found["tree"].nodes_per_step) == (3, 4)
    assert found["tree"].step == pytest.approx(2 / 12)
    assert found["tree"].identical == 1


def test_four_rounds_print_no_ratio():
    data = rounds("a", CELL, no_speculation=[1.0] * 4, tree=[2.0] * 4, chain_3=[1.5] * 4)
    found = results.rows([CELL], CONFIGS, data)
    for row in found:
        assert row.to_base is None
        assert row.to_best_chain is None
    table = tables.tables(found, [])[0]
    assert [line[2:4] for line in table.rows] == [("-", "-")] * 3


def test_phases_and_what_is_outside_the_models():
    phases = {"draft": 0.4, "verify": 1.2, "tree": 0.1, "accept": 0.2, "commit": 0.06}
    data = [Round("a", CELL.name, 1, {BASE: measured(1), "tree": measured(1, ("b",), phases=phases)})]
    plain, ours = results.rows([CELL], [PLAIN, tree("tree")], data)
    assert plain.phases == {}
    assert plain.outside is None
    assert ours.outside == pytest.approx(0.2)
    assert ours.phases["commit"] == pytest.approx(0.005)
    assert ours.identical == 0


def test_a_swinging_load_against_the_best_fixed_of_each_phase():
    cell = Cell("swing", 32)

    def swung(few, many):
        return measured(1, swing={"1": [few * 2, 2.0], "32": [many * 4, 4.0]})

    data = [
        Round("a", cell.name, n, {BASE: swung(10, 500), "chain 3": swung(20, 300), "tree": swung(19, 550)})
        for n in range(1, 6)
    ]
    found = {(row.config, row.concurrency): row for row in results.swing_rows([cell], CONFIGS, data)}
    assert found["tree", 1].best_fixed == "chain 3"
    assert found["tree", 1].to_best_fixed[0] == pytest.approx(0.95)
    assert found["tree", 32].best_fixed == BASE
    assert found["tree", 32].to_best_fixed[0] == pytest.approx(1.1)
    assert found[BASE, 32].tokens_per_second[0] == 500
    assert results.rows([cell], CONFIGS, data) == []


def test_tables_and_json_say_the_same(tmp_path):
    data = rounds("a", CELL, no_speculation=[100.0] * 5, tree=[123.0] * 5, chain_3=[110.0] * 5)
    found = results.rows([CELL], CONFIGS, data)
    settings = {
        "model": "target",
        "draft": "draft",
        "dtype": "bfloat16",
        "eager": False,
        "threads": "2",
        "max_tokens": 48,
        "waves": 12,
        "enlarged": {"parameters": 500_000_000},
    }
    text = tables.markdown(settings, tables.tables(found, []), tables.notes(found), {"stage": "it did not start"})
    assert "enlarged to 500,000,000 parameters without a change of its function" in text
    assert "48 new tokens per request, 12 requests for each that runs at a time." in text
    assert "| tree | 123.0 [123.0, 123.0] | 1.23 [1.23, 1.23] | 1.12 [1.12, 1.12] (chain 3) |" in text
    assert "Did not run: stage: it did not start" in text
    report = json.loads(json.dumps(results.to_json(settings, found, [], {})))
    assert [row["tokens_per_second"]["median"] for row in report["rows"]] == [100, 110, 123]
    assert middle(row["rounds"] for row in report["rows"]) == 5


def test_notes_that_a_reader_needs():
    def notes(**changes):
        data = [Round("a", CELL.name, 1, {BASE: measured(1), "chain 3": measured(1, **changes)})]
        return " ".join(tables.notes(results.rows([CELL], CONFIGS, data)))

    assert "do not trust" not in notes(other_cores=0.05)
    assert "Other programs kept up to 0.7 cores busy" in notes(other_cores=0.7)
    assert "repaired" not in notes()
    assert "sampling was repaired" in notes(repaired=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_the_repaired_expansion(dtype):
    values = torch.tensor([0, 7, 3]).to(dtype)
    found = expand(values, torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert found.tolist() == [1, 1, 3, 3, 3]
    assert found.dtype == dtype
    half = expand(torch.tensor([0.5, 0.7]), torch.tensor([1, 2]), 2, 0, 1)
    torch.testing.assert_close(half, torch.tensor([0.5, 0.7]))


def test_other_programs_are_seen():
    idle = Others([os.getpid()])
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        pass
    alone = idle.cores()
    busy = Others([])  # this process is one of the others now
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        pass
    assert busy.cores() > max(0.5, 0.5 * alone)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_adaptive_tree.bench.plots import draw

    data = rounds("a", CELL, no_speculation=[100.0] * 5, tree=[123.0] * 5, chain_3=[110.0] * 5)
    written = draw(tmp_path, CELLS, CONFIGS, results.rows(CELLS, CONFIGS, data))
    assert [file.name for file in written] == ["throughput.png", "tokens_per_step.png"]
    assert all(file.stat().st_size > 5000 for file in written)
    assert draw(tmp_path, CELLS, CONFIGS, []) == []


# ---- projection


def costs(tmp_path, **changes):
    data = {
        "name": "a machine",
        "verify": {"rows": [1, 101], "seconds": [1.0, 2.0]},
        "draft": {"rows": [1, 101], "seconds": [0.1, 1.1]},
        "step": 0.5,
    }
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**data, **changes}))
    return read_costs(file)


def test_a_projection_by_hand(tmp_path):
    """4 nodes, of them 1, 2, 1 at three depths: levels of one request and step, 4 / 3 rows each."""
    data = [Round("a", CELL.name, 1, {BASE: measured(1, decode_tokens=10, nodes=0), "chain 1": measured(1, nodes=10)})]
    data[0].measured["tree"] = measured(1, nodes=40, depths={"1": 10, "2": 20, "3": 10})
    found = results.rows([CELL], CONFIGS, data)
    plain, one, ours = project(costs(tmp_path), [CELL], CONFIGS, found)
    assert (plain.to_base, plain.tokens_per_second) == (1, pytest.approx(1 / 1.5))
    assert one.tokens_per_second == pytest.approx(3 / (1.01 + 0.1 + 0.5))
    assert ours.tokens_per_second == pytest.approx(3 / (1.04 + 3 * (0.1 + 0.01 / 3) + 0.5))
    assert ours.to_base == pytest.approx(ours.tokens_per_second * 1.5)
    table = tables.projection("a machine", [plain, one, ours])
    assert table.title.startswith("a projection, not a measurement")


@pytest.mark.parametrize("changes", [{"step": -1}, {"draft": {}}, {"verify": {"rows": [1], "seconds": [1]}}])
def test_costs_that_are_none(tmp_path, changes):
    with pytest.raises(ValueError, match=r"holds no costs.*it needs name, verify and draft"):
        costs(tmp_path, **changes)
    with pytest.raises(ValueError, match="holds no costs"):
        read_costs(tmp_path / "missing.json")


def test_a_roofline():
    """First the reading of the weights, then the operations."""
    found = roofline(1e9, rows_up_to(512), width=2, bandwidth=4e12, operations=1e15)
    assert found["seconds"][0] == 2e9 / 4e12
    assert found["seconds"][-1] == 2e9 * 512 / 1e15
    assert found["rows"][:7] == [1, 2, 3, 4, 6, 8, 12]
    shipped = Path(plan.__file__).parent / "curves"
    for file in shipped.glob("*.json"):
        assert read_costs(file).seconds(8, 16, 4) > read_costs(file).seconds(8, 0, 0) > 0


# ---- command line


def test_arguments():
    assert _list(int)("1, 3,5") == [1, 3, 5]
    assert _list(int)("") == []
    assert _config('wide={"method": "opt_tree", "num_speculative_tokens": 8}')[0] == "wide"
    for kind, text, message in (
        (_method, "opt", "no tree method; known: opt_tree"),
        (_rounds, "4", "4 rounds are too few for a ratio; give 5 or more"),
        (_config, "wide", "no NAME=JSON"),
        (_config, 'wide={"method": "opt_tree"}', "num_speculative_tokens"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            kind(text)
    nothing = argparse.Namespace(concurrency=[], sampled=[], server=[], swing=None, first_steps=[])
    with pytest.raises(ValueError, match="nothing to measure"):
        cells(nothing)


def test_two_of_one_name(tmp_path, capsys):
    twice = ["bench", "--out", str(tmp_path / "o"), "--methods", "opt_tree,opt_tree", "--concurrency", "1"]
    assert main(twice) == 2
    assert "two configurations have the name 'opt_tree'" in capsys.readouterr().err
