"""Judgements of lines of the papers' pages, and agreement of the pages with the results."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import c2t, smollm2
from benchmarks.papers.__main__ import main
from benchmarks.papers.bootstrap import (
    Estimate,
    costed,
    difference,
    lead,
    least_rise,
    mean,
    merged,
    pooled,
    ratio,
    relative,
)
from benchmarks.papers.judging import OURS, Source
from benchmarks.papers.saving import nodes_saved
from benchmarks.papers.scale import FULL, SMOLLM2
from benchmarks.papers.summary import PAPERS, page
from benchmarks.papers.writing import Section

ROOT = Path(__file__).parents[1]
SAID = Source("Table 1", "2 -> 3", headline=True)


def record(tokens, nodes=None, files=None):
    count = len(tokens)
    return {
        "steps": [10] * count,
        "tokens": tokens,
        "nodes": nodes or [100] * count,
        "forwards": [50] * count,
        "file": files or list(range(count)),
    }


def test_a_line_is_judged_by_paired_prompts():
    lower = [20 + 3 * (i % 7) for i in range(40)]  # prompts differ by more than the two cells do
    higher = [tokens + 1 + i % 2 for i, tokens in enumerate(lower)]
    gain = difference(record(higher), record(lower))
    assert gain.mean == pytest.approx(0.15)
    assert SAID.judge("", gain).verdict == "holds"
    assert SAID.judge("", difference(record(lower), record(higher))).verdict == "does not hold"
    assert SAID.judge("", difference(record(lower), record(lower))).verdict == "within noise"
    assert ratio(record(lower)).resolution > 4 * gain.resolution
    assert pooled([(record(higher), record(lower)), (record(lower), record(lower))]).mean == pytest.approx(0.075)


def test_prompts_of_a_file_are_resampled_together():
    """Eight equal cuts of five files tell no more than five prompts."""
    tokens = [20 + 4 * (i % 5) for i in range(40)]
    together, apart = ratio(record(tokens, files=[i % 5 for i in range(40)])), ratio(record(tokens))
    assert together.mean == apart.mean
    assert together.resolution == pytest.approx(8**0.5 * apart.resolution, rel=0.15)
    values = [tokens[i] / 10 for i in range(40)]
    assert mean(values, [i % 5 for i in range(40)]) == pytest.approx(together)


def test_draws_of_a_cell_are_added_up():
    one, other = record([20, 30]), record([22, 36])
    both = merged([one | {"each": [(1.0, 1)]}, other | {"each": [(2.0, 2)]}])
    assert both["tokens"] == [42, 66]
    assert both["steps"] == [20, 20]
    assert both["file"] == [0, 1]
    assert both["each"] == [(1.0, 1), (2.0, 2)]


def test_noise_says_what_it_would_have_resolved():
    noisy = SAID.judge("", Estimate(0.01, -0.04, 0.08))
    assert noisy.verdict == "within noise"
    assert noisy.figures.endswith("; resolves 0.060")
    assert "resolves" not in SAID.judge("", Estimate(0.05, 0.01, 0.08)).figures


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [((-0.02, -0.04, 0.01), "holds"), ((-0.04, -0.08, 0.01), "within noise"), ((-0.09, -0.12, -0.06), "does not hold")],
)
def test_a_limit_is_shown_and_judged_against(gain, verdict):
    one = Estimate(*gain)
    claim = SAID.judge("", one, least=-0.05, shown=one.percent())
    assert claim.verdict == verdict
    assert claim.figures.startswith(f"{one.percent()}; limit -5%")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [((0.0, -0.09, 0.09), "holds"), ((0.0, -0.2, 0.2), "within noise"), ((-0.3, -0.4, -0.2), "does not hold")],
)
def test_what_should_stay_the_same_is_within_a_margin(change, verdict):
    assert SAID.judge_equal("", Estimate(*change), 0.1).verdict == verdict


def test_nodes_at_equal_acceptance():
    theirs = [record([20 + i % 3 for i in range(20)], [100] * 20), record([30 + i % 3 for i in range(20)], [400] * 20)]
    ours = [record([18 + i % 3 for i in range(20)], [50] * 20), record([32 + i % 3 for i in range(20)], [240] * 20)]
    saved = nodes_saved([ours], [theirs], at=theirs[1])
    expected = 50 * (240 / 50) ** (12 / 14)
    assert saved.mean == pytest.approx(1 - expected / 400, abs=1e-6)


def test_curves_are_not_extrapolated():
    few = [record([20] * 20, [50] * 20), record([24] * 20, [60] * 20)]
    most = [record([10] * 20, [10] * 20), record([30] * 20, [400] * 20)]
    saved = nodes_saved([few], [most], at=most[1])
    assert saved.mean == -np.inf
    claim = SAID.judge("", saved, shown=saved.percent())
    assert claim.verdict == "not reached"
    assert claim.figures == "not reached [not reached, not reached]"
    below = nodes_saved([few], [most], at=record([15] * 20))  # no smaller tree of `few` is known
    assert below.mean == pytest.approx(1 - 50 / (10 * 40**0.25))


def test_no_curve_reaches_nothing():
    at = record([20] * 20)
    for curves in (([], [[at]]), ([[at]], [])):
        claim = SAID.judge("", nodes_saved(*curves, at))
        assert claim.verdict == "not reached"


def test_every_size_of_eagle_2_has_a_line():
    """Those that no tree of C2T's reaches, and those at which it saves little."""
    sizes = {"EAGLE-2 10": (20, 10), "EAGLE-2 26": (22, 26), "EAGLE-2 60": (24, 60), "EAGLE-2 90": (40, 90)}
    gated = {"0.9": (18, 8), "0.5": (30, 40)}
    cells = {name: record([tokens] * 5, [10 * nodes] * 5) for name, (tokens, nodes) in sizes.items()}
    for name in ("C2T", c2t.WHOLE, "C2T chain"):
        cells |= {f"{name} {beta}": record([tokens] * 5, [10 * nodes] * 5) for beta, (tokens, nodes) in gated.items()}
    cells["chain 3"] = record([22] * 5, [30] * 5)
    claims = {claim.text: claim for claim in c2t.section(cells, Path()).claims}
    for name in ("C2T", c2t.WHOLE):
        for size in (10, 26, 60, 90):
            for line in ("at least 20 % fewer nodes", "fewer nodes"):
                claim = claims[f"{name}: {line} at EAGLE-2's acceptance (N = {size})"]
                assert (claim.verdict == "not reached") == (size == 90)
                own = dict.fromkeys(c2t.SAVES, "at least 20 % fewer nodes") | dict.fromkeys(c2t.AT, "fewer nodes")
                assert bool(claim.source) == (line == own.get((name, size))), "the sizes of the paper"
    assert claims["C2T: at least 20 % fewer nodes at EAGLE-2's acceptance (N = 10)"].verdict == "does not hold"


def test_an_interval_that_some_resamples_do_not_reach_has_no_end():
    at = record([20 + 2 * (i % 5) for i in range(20)], files=[i % 5 for i in range(20)])
    ours = [record([10] * 20, [10] * 20), record([25] * 20, [40] * 20)]
    theirs = [record([10] * 20, [10] * 20), record([40] * 20, [900] * 20)]
    saved = nodes_saved([ours], [theirs], at)
    assert saved.mean > 0
    assert saved.low == -np.inf
    assert saved.percent().split("[")[1].startswith("not reached, ")
    assert SAID.judge("", saved).verdict == "within noise"


def test_trainings_are_resampled():
    def curve(factor):
        return [record([20] * 20, [100 * factor] * 20), record([30] * 20, [400 * factor] * 20)]

    at = record([25] * 20)
    one, three = nodes_saved([curve(1)], [curve(2)], at), nodes_saved([curve(0.5), curve(1), curve(2)], [curve(2)], at)
    assert one.mean == pytest.approx(0.5)
    assert three.mean == pytest.approx(0.5)  # the geometric mean of the trainings
    assert one.resolution == pytest.approx(0, abs=1e-9)
    assert three.resolution > 0.2


def test_a_ratio_has_its_own_interval():
    """Files in which both are twice as fast say nothing about how they compare."""
    slow = record([20, 40, 20, 40])
    gain = relative(record([30, 60, 30, 60]), slow)
    assert gain == pytest.approx((0.5, 0.5, 0.5))
    assert ratio(slow).resolution > 0.5
    assert relative(record([30, 60]), slow).mean == pytest.approx(0.5)  # over the prompts that both have


def test_a_rise_is_judged_by_its_least_step():
    counts = [[10, 10, 10]] * 6
    rise = least_rise([[1, 4, 9]] * 6, counts, list(range(6)))
    assert rise == pytest.approx((0.3, 0.3, 0.3))
    assert SAID.judge("", rise).verdict == "holds"
    assert SAID.judge("", least_rise([[1, 5, 4]] * 6, counts, list(range(6)))).verdict == "does not hold"
    mixed = [[1, 5, 6 + 3 * (i % 2)] if i < 4 else [1, 6, 4] for i in range(6)]
    assert SAID.judge("", least_rise(mixed, counts, list(range(6)))).verdict == "within noise"


def test_the_best_of_some_thresholds_must_lead():
    slow, fast = record([20, 22, 24]), record([30, 32, 33])
    cost = [costed(one, 0.1) for one in (slow, fast)]
    assert cost[0]["cost"] == [15, 15, 15]
    assert SAID.judge("", lead([cost[1], cost[0]], [cost[0]], "cost")).verdict == "holds"
    assert SAID.judge("", lead([cost[0]], cost, "cost")).verdict == "does not hold"


def test_lines_of_ours_are_not_the_papers():
    sure = Estimate(0.1, 0.05, 0.2)
    claims = [SAID.judge("a > b (T = 0)", sure), SAID.judge("a > b (T = 1)", sure), OURS.judge("c > d", sure)]
    section = Section(PAPERS[0], "", [], claims)
    assert "The papers' claims: 2 lines, 2 hold." in page([section], FULL).replace("\n", " ")
    assert "among these: 1 lines, 1 hold." in page([section], FULL).replace("\n", " ")
    row = "| Table 1 | 2 -> 3 | a > b | T = 0: +0.100 [+0.050, +0.200]<br>T = 1: +0.100 [+0.050, +0.200] | holds |"
    assert row in page([section], FULL)
    assert "c > d" not in page([section], FULL)
    papers, ours = section.markdown().split("Ours, which no paper claims:")
    assert "| Table 1 | 2 -> 3 |" in papers
    assert "c > d" in ours
    assert "c > d" not in papers


def test_the_pages_are_those_of_the_results(tmp_path):
    kept = ROOT / "benchmarks" / "results" / "papers"
    for name in ("measured.json", "smollm2.json"):
        shutil.copy(kept / name, tmp_path)
    main(["--render", "--results", str(tmp_path), "--docs", str(tmp_path)])
    assert (tmp_path / "verdicts.json").read_text() == (kept / "verdicts.json").read_text()
    for file in (ROOT / "docs" / "papers.md", kept / "tables.md"):
        assert (tmp_path / file.name).read_text() == file.read_text(), "run python -m benchmarks.papers --render"


def test_the_share_of_tree_operations():
    """From the phases of a step: tree, accept and commit over the step, in ms."""
    rows = re.findall(r"^\| \d+ \| ([\d.| ]+) %? ?\|$", (ROOT / "docs" / "tuning.md").read_text(), re.MULTILINE)
    steps = [[float(one) for one in row.split(" | ")] for row in rows]
    shares = sorted(100 * (tree + accept + commit) / step for step, _, _, tree, accept, commit, *_ in steps)
    assert len(shares) == 2
    page = (ROOT / "docs" / "papers.md").read_text().replace("\n", " ")
    assert f"Ours take {shares[0]:.1f} to {shares[-1]:.1f} %" in page


def test_what_a_draft_temperature_saves():
    """The note above C2T's lines, from our own lines in the tables."""
    lines = json.loads((ROOT / "benchmarks" / "results" / "papers" / "verdicts.json").read_text())["c2t_sharp"]
    figures = {line["text"]: (line["verdict"], line["figures"].replace("+", "")) for line in lines}
    page = (ROOT / "docs" / "papers.md").read_text().replace("\n", " ")

    def of(text):
        return [figures[f"{text} at EAGLE-2's acceptance (N = {nodes})"] for nodes in (30, 60, 100)]

    saved = of("EAGLE-2, sharpened: fewer nodes than EAGLE-2")
    assert [verdict for verdict, _ in saved] == ["holds"] * 3
    shares = sorted(int(found.split("%")[0]) for _, found in saved)
    assert f"{shares[0]} to {shares[-1]} % fewer nodes" in page
    more = of("C2T, sharpened: fewer nodes than EAGLE-2, sharpened")
    assert [verdict for verdict, _ in more] == ["within noise"] * 3
    first, *others = (re.findall(r"-?\d+(?=%)", found) for _, found in more)
    assert f"saves {first[0]} % [{first[1]} %, {first[2]} %] more" in page
    assert all(f"{abs(int(one[0]))} %" in page for one in others)


def test_a_line_of_smollm2_is_judged_by_its_own_cells():
    """Tokens per step of one cell over another's; alpha over four levels; nodes at the acceptance of EAGLE-2."""

    def record(tokens, nodes=20.0):
        return {"file": [0, 1, 2, 3], "steps": [10] * 4, "tokens": [tokens] * 4, "nodes": [10 * nodes] * 4}

    cells = {"OPT-Tree 0": record(30), "binary 0": record(25), "4x2x2x1": record(30), "1x1x1x1": record(22)}
    cells |= {f"EAGLE-2 {size}": record(20 + size / 10, size) for size in smollm2.SIZES}
    cells |= {f"C2T {beta:g}": record(26 - 10 * beta, 30 - 20 * beta) for beta in smollm2.BETAS}
    by_text = {line.bundled: line for line in smollm2.LINES}
    found = smollm2._judged(cells, by_text["OPT-Tree >= binary (N = 25, T = 0)"])
    assert (found.verdict, found.figures) == ("holds", "+0.500 [+0.500, +0.500]")
    found = smollm2._judged(cells, by_text["alpha: 4x2x2x1 > 1x1x1x1 (T = 0.7)"])
    assert found.figures == "+0.200 [+0.200, +0.200]"
    found = smollm2._judged(cells, by_text["C2T: fewer nodes at EAGLE-2's acceptance (N = 60)"])
    assert found.verdict == "not reached", "26 tokens of EAGLE-2 with 60 nodes are more than any of its trees accepts"


def test_every_line_of_smollm2_is_one_of_the_bundled_pair():
    verdicts = json.loads((ROOT / "benchmarks" / "results" / "papers" / "verdicts.json").read_text())
    known = {claim["text"] for name, claims in verdicts.items() if name != "provenance" for claim in claims}
    cells = smollm2.jobs(SMOLLM2)
    for line in smollm2.LINES:
        assert line.bundled in known
        assert line.b in cells
        assert line.a == "C2T" or line.a in cells
