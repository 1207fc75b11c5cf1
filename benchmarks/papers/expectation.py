"""OPT-Tree's E(A): does it predict acceptance, and where is it best to stop? (Wang et al., arXiv 2406.17276)"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.papers import opt_tree
from benchmarks.papers.bootstrap import costed, lead, ratio
from benchmarks.papers.jobs import Results, Work, cell
from benchmarks.papers.judging import OURS, Source
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, heat_map, table

MU = (0.05, 0.1, 0.2, 0.4)  # draft forward over target forward
PREDICTS = Source("Figure 5, A grows with E(A)", "a curve", headline=True)
THRESHOLD = Source("section on the threshold", "0.2 best for the 68M draft, 0.8 for EAGLE", True)
SPEED = Source('abstract, "a speed-up ratio of up to 3.2"', "3.21 (70B, EAGLE, GSM8K)", headline=True)
MODELLED = 0.1  # mu
MAPS = {"OPT-Tree 25": "T = 0", "OPT-Tree, sharpened 25": "T = 0, sharpened", "OPT-Tree 25 T=1": "T = 1"}


def jobs(scale: Scale) -> dict[str, Work]:
    trees = opt_tree.jobs(scale)
    found = {name: trees[name] for name in MAPS if name in trees}
    for threshold in scale.some((0, 0.1, 0.2, 0.3, 0.5, 0.8), (0, 0.5)):
        tree = {**opt_tree.PLAIN, "threshold": threshold}
        found[f"threshold {threshold}"] = cell("opt_tree", 50, tree=tree, **scale.greedy)
    return found


def section(r: Results, figures: Path) -> Section:
    rows, images, claims = [], [], []
    for name, what in MAPS.items():
        if name not in r:
            continue
        expected, accepted = np.array(r[name]["each"]).T
        correlation = float(np.corrcoef(expected, accepted)[0, 1])
        means = {
            low: float(accepted[(expected >= low) & (expected < low + 1)].mean())
            for low in range(int(expected.max()) + 1)
            if ((expected >= low) & (expected < low + 1)).sum() >= 30
        }
        rows.append((what, len(expected), float(expected.mean()), float(accepted.mean()), correlation))
        file = figures / f"expected_acceptance_{what.replace('T = ', 't').replace(', ', '_')}.png"
        heat_map(file, r[name]["each"], f"OPT-Tree, 25 nodes, {what}")
        images.append(f"![E(A) against A, {what}](figures/{file.name})")
        rising = all(a < b for a, b in pairwise(means.values()))
        shown = ", ".join(f"{low} to {low + 1}: {mean:.2f}" for low, mean in means.items())
        source = OURS if "sharpened" in what else PREDICTS
        claims.append(source.judge_fact(f"mean A grows with E(A) ({what})", rising, shown, "bins with few steps"))
    heads = ("", "steps", "predicted: mean E(A)", "observed: mean A", "correlation")
    parts = [
        "E(A), the sum of the path probabilities of a tree's nodes, against the number A of accepted tokens, 25 "
        "nodes; the dashed line is A = E(A), columns of fewer than ten steps are left blank. Bins of one token "
        "with fewer than 30 steps are left out of the lines.",
        table(heads, rows),
        "\n".join(images),
    ]
    values = sorted(float(name.split()[1]) for name in r if name.startswith("threshold "))
    records = {value: r[f"threshold {value:g}"] for value in values}
    rows = []
    for value, record in records.items():
        speeds = (ratio(costed(record, mu), "tokens", "cost").mean for mu in MU)
        rows.append((f"{value:g}", ratio(record), ratio(record, "forwards"), *speeds))
    heads = ("threshold", "tokens per step", "draft forwards per step", *(f"speed at mu = {mu:g}" for mu in MU))
    for mu in MU:
        inside = [costed(record, mu) for value, record in records.items() if mu <= value <= 1]
        outside = [costed(record, mu) for value, record in records.items() if not mu <= value <= 1]
        others = "all outside" if any(0 < value < mu for value in records) else "no threshold"
        text = f"some threshold in [mu, 1] is faster than {others}, modelled (mu = {mu:g})"
        claims.append(THRESHOLD.judge(text, lead(inside, outside, "cost"), SMALLER))
    speeds_ = {value: ratio(costed(record, MODELLED), "tokens", "cost") for value, record in records.items()}
    value, best = max(speeds_.items(), key=lambda pair: pair[1].mean)
    text = f"a speed-up of 3.2, modelled (mu = {MODELLED:g})"
    shown = f"{best} at threshold {value:g}, 50 nodes"
    claims.append(SPEED.judge_fact(text, best.mean >= 3.2, shown, WEAKER, otherwise="not reached"))
    parts += [
        "The threshold sweep, 50 nodes, depth 10, greedy: a tree stops growing when a level adds no more than this "
        "to E(A). Speed is modelled as tokens / (1 + mu * draft forwards), in plain target forwards; mu is what a "
        "draft forward costs beside a target forward.",
        table(heads, rows),
    ]
    return Section(opt_tree.PAPER, "OPT-Tree: E(A) and the threshold", parts, claims)


WEAKER = "the paper's largest is with a stronger draft"
SMALLER = (
    "a level's gain in E(A) underestimates what it adds to a greedy target's acceptance, so smaller thresholds pay too"
)
