"""Tables, notes, JSON and plots of the same rows."""

import json
from statistics import median as middle

import pytest

from tests.pure.benches import CELL, CELLS, CONFIGS, measured, rounds
from vllm_adaptive_tree.bench import results, tables
from vllm_adaptive_tree.bench.plan import BASE
from vllm_adaptive_tree.bench.rounds import Round


def test_four_rounds_print_no_ratio():
    data = rounds("a", CELL, no_speculation=[1.0] * 4, tree=[2.0] * 4, chain_3=[1.5] * 4)
    found = results.rows([CELL], CONFIGS, data)
    for row in found:
        assert row.to_base is None
        assert row.to_best_chain is None
    table = tables.speed([CELL], found)[0]
    assert [line[2:4] for line in table.rows] == [("-", "-")] * 3


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
        "requests_per_slot": 12,
        "enlarged": {"parameters": 500_000_000},
    }
    text = tables.markdown(settings, tables.speed([CELL], found), tables.warnings(found), {"stage": "it did not start"})
    assert "enlarged to 500,000,000 parameters with the same function" in text
    assert "48 new tokens per request, 12 requests per concurrent request." in text
    assert "| tree | 123.0 [123.0, 123.0] | 1.23 [1.23, 1.23] | 1.12 [1.12, 1.12] (chain 3) |" in text
    assert "Did not run: stage: it did not start" in text
    report = json.loads(json.dumps(results.to_json(settings, found, [], {})))
    assert [row["tokens_per_second"]["median"] for row in report["rows"]] == [100, 110, 123]
    assert middle(row["rounds"] for row in report["rows"]) == 5


def test_notes_that_a_reader_needs():
    def notes(**changes):
        data = [Round("a", CELL.name, 1, {BASE: measured(1), "chain 3": measured(1, **changes)})]
        return " ".join(tables.warnings(results.rows([CELL], CONFIGS, data)))

    assert "do not trust" not in notes(other_cores=0.05)
    assert "Other programs kept up to 0.7 cores busy" in notes(other_cores=0.7)
    assert "repaired" not in notes()
    assert "sampling was repaired" in notes(repaired=True)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_adaptive_tree.bench.plots import draw

    data = rounds("a", CELL, no_speculation=[100.0] * 5, tree=[123.0] * 5, chain_3=[110.0] * 5)
    written = draw(tmp_path, CELLS, CONFIGS, results.rows(CELLS, CONFIGS, data))
    assert [file.name for file in written] == ["throughput.png", "tokens_per_step.png"]
    assert all(file.stat().st_size > 5000 for file in written)
    assert draw(tmp_path, CELLS, CONFIGS, []) == []
