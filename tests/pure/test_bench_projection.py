"""Cost files, and the acceptance under the costs of other hardware."""

import json
from pathlib import Path

import pytest

from tests.pure.benches import CELL, CONFIGS, measured
from vllm_adaptive_tree.bench import plan, results, tables
from vllm_adaptive_tree.bench.costs import roofline
from vllm_adaptive_tree.bench.plan import BASE
from vllm_adaptive_tree.bench.projection import project, read_hardware
from vllm_adaptive_tree.bench.rounds import Round
from vllm_adaptive_tree.cli.main import main

COSTS = {
    "verify": {"rows": [1, 101], "seconds": [1.0, 2.0]},
    "draft": {"rows": [1, 101], "seconds": [0.1, 1.1]},
    "context": 0.0,
}


def read(tmp_path, **content):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(content))
    return read_hardware(file)


@pytest.fixture
def hardware(tmp_path):
    return read(tmp_path, name="a machine", step=0.5, costs=COSTS)


def test_a_cost_file_is_written_as_it_is_read(hardware, tmp_path):
    assert read(tmp_path, **hardware.to_json()).to_json() == hardware.to_json()


def test_the_cost_profile_of_an_engine(tmp_path):
    found = read(tmp_path, key={"draft": "b"}, costs={**COSTS, "context": 1e-6}, learnt={"controller": {}})
    assert (found.name, found.step, found.costs.verify.cost(101)) == ("costs", 0, 2.0)


def test_a_projection_by_hand(hardware):
    """4 nodes, of them 1, 2, 1 at three depths: levels of one request and step, 4 / 3 rows each."""
    data = [Round("a", CELL.name, 1, {BASE: measured(1, decode_tokens=10, nodes=0), "chain 1": measured(1, nodes=10)})]
    data[0].measured["tree"] = measured(1, nodes=40, depths={"1": 10, "2": 20, "3": 10})
    found = results.rows([CELL], CONFIGS, data)
    plain, one, ours = project(hardware, [CELL], CONFIGS, found)
    assert (plain.to_base, plain.tokens_per_second) == (1, pytest.approx(1 / 1.5))
    assert one.tokens_per_second == pytest.approx(3 / (1.01 + 0.1 + 0.5))
    assert ours.tokens_per_second == pytest.approx(3 / (1.04 + 3 * (0.1 + 0.01 / 3) + 0.5))
    assert ours.to_base == pytest.approx(ours.tokens_per_second * 1.5)
    table = tables.projection("a machine", [plain, one, ours])
    assert table.title.startswith("a projection, not a measurement")


@pytest.mark.parametrize(
    "content",
    [
        {"step": -1, "costs": COSTS},
        {"costs": {**COSTS, "draft": {}}},
        {"costs": {**COSTS, "draft": None}},
        {"costs": {**COSTS, "verify": {"rows": [1], "seconds": [1]}}},
        {"name": "curves alone", "verify": COSTS["verify"], "draft": COSTS["draft"], "step": 0.5},
    ],
)
def test_costs_that_are_none(tmp_path, content):
    with pytest.raises(ValueError, match=r"holds no costs.*it needs name, step \(seconds\) and costs"):
        read(tmp_path, **content)
    with pytest.raises(ValueError, match="holds no costs"):
        read_hardware(tmp_path / "missing.json")


def test_a_roofline():
    """First the reading of the weights, then the operations."""
    found = roofline(1e9, 512, width=2, bandwidth=4e12, operations=1e15)
    assert found.cost(1) == 2e9 / 4e12
    assert found.cost(512) == 2e9 * 512 / 1e15
    assert found.rows[:8].tolist() == [1, 2, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("name", ["h200", "two_cores"])
def test_bundled_costs(name):
    found = read_hardware(Path(plan.__file__).parent / "curves" / f"{name}.json")
    assert found.seconds(8, 16, 4) > found.seconds(8, 0, 0) > 0


def test_a_roofline_of_the_command_line(tmp_path):
    file = tmp_path / "costs.json"
    sizes = [
        "--target",
        "32.8B",
        "--draft",
        "0.49B",
        "--bandwidth",
        "4.8e12",
        "--operations",
        "989e12",
        "--step",
        "1e-3",
    ]
    assert main(["costs", "roofline", *sizes, "--name", "H200", "--out", str(file)]) == 0
    found = read_hardware(file)
    assert (found.name, found.step) == ("H200", 1e-3)
    assert found.costs.verify.cost(1) == pytest.approx(2 * 32.8e9 / 4.8e12)
