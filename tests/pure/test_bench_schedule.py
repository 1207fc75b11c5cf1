"""The order and the limits of rounds; engines are made up, times are those of a fake clock."""

from tests.pure.benches import CELLS, CONFIGS, PLAIN, chain, measured, tree
from vllm_adaptive_tree.bench import plan
from vllm_adaptive_tree.bench.plan import BASE
from vllm_adaptive_tree.bench.rounds import Store
from vllm_adaptive_tree.bench.schedule import Schedule


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
