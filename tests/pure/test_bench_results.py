"""Rows and ratios, from rounds."""

import pytest

from tests.pure.benches import CELL, CONFIGS, PLAIN, measured, rounds, tree
from vllm_adaptive_tree.bench import results
from vllm_adaptive_tree.bench.plan import BASE, Cell
from vllm_adaptive_tree.bench.rounds import Round


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


def test_phases_and_what_is_outside_the_models():
    phases = {"draft": 0.4, "verify": 1.2, "tree": 0.1, "accept": 0.2, "commit": 0.06}
    data = [Round("a", CELL.name, 1, {BASE: measured(1), "tree": measured(1, ("b",), phases=phases)})]
    plain, ours = results.rows([CELL], [PLAIN, tree("tree")], data)
    assert plain.phases == {}
    assert plain.outside is None
    assert ours.outside == pytest.approx(0.2)
    assert ours.phases["commit"] == pytest.approx(0.005)
    assert ours.identical == 0


def test_a_bursty_load_against_the_best_fixed_of_each_phase():
    cell = Cell("bursty", 32)

    def swung(few, many):
        return measured(1, bursty={"1": [few * 2, 2.0], "32": [many * 4, 4.0]})

    data = [
        Round("a", cell.name, n, {BASE: swung(10, 500), "chain 3": swung(20, 300), "tree": swung(19, 550)})
        for n in range(1, 6)
    ]
    found = {(row.config, row.concurrency): row for row in results.bursty_rows([cell], CONFIGS, data)}
    assert found["tree", 1].best_fixed == "chain 3"
    assert found["tree", 1].to_best_fixed[0] == pytest.approx(0.95)
    assert found["tree", 32].best_fixed == BASE
    assert found["tree", 32].to_best_fixed[0] == pytest.approx(1.1)
    assert found[BASE, 32].tokens_per_second[0] == 500
    assert results.rows([cell], CONFIGS, data) == []
