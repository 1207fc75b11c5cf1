"""OPT-Tree (Wang et al., arXiv 2406.17276)."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.jobs import Job, Results, cell
from benchmarks.papers.judging import difference, judge, judge_fact, ratio
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, heat_map, table

MU = (0.05, 0.1, 0.2, 0.4)  # draft forward over target forward
THEIRS = {  # MT-Bench, T = 0: binary, EAGLE's tree, OPT-Tree
    "LLaMA-2-7B, draft 68M": (2.12, 2.47, 2.58),
    "LLaMA-2-7B, draft 1B": (3.95, 4.23, 4.88),
    "LLaMA-2-7B, draft EAGLE": (3.40, 3.73, 4.36),
    "LLaMA-2-70B, draft 7B": (4.84, 4.97, 7.74),
}
THEIRS_SAMPLED = {  # MT-Bench, T = 1, draft EAGLE: EAGLE's tree, OPT-Tree
    "LLaMA-2-7B": (3.37, 4.07),
    "LLaMA-2-13B": (3.45, 4.13),
    "LLaMA-2-70B": (3.51, 4.09),
    "Vicuna-33B": (2.70, 2.89),
}
PLAIN = {"threshold": 0, "draft_temperature": 1}


def methods(temperature: float) -> dict[str, tuple[str, dict[str, Any]]]:
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "binary": ("static_tree", {"shape": "binary", "children": "top_k"}),
        "EAGLE-1 tree": ("static_tree", {"shape": "eagle1", "children": "top_k"}),
        "EAGLE-2": ("eagle2", {}),
        "EAGLE-2, depth 10": ("eagle2", {"max_depth": 10}),
        "OPT-Tree": ("opt_tree", PLAIN),
    }
    if temperature == 0:
        found["OPT-Tree, sharpened"] = ("opt_tree", {"threshold": 0, "draft_temperature": 0.6})
    return found


def jobs(scale: Scale) -> dict[str, Job]:
    found = {}
    for nodes in scale.some((25, 50), (25,)):
        for name, (method, tree) in methods(0).items():
            if name != "EAGLE-1 tree" or nodes == 25:
                found[f"{name} {nodes}"] = cell(method, nodes, tree=tree, keep_steps=nodes == 25, **scale.greedy)
    for name, (method, tree) in methods(1).items():
        found[f"{name} 25 T=1"] = cell(method, 25, 1.0, tree=tree, keep_steps=name == "OPT-Tree", **scale.sampled)
    for nodes in scale.some((5, 10, 25, 50, 100), (5, 25)):
        few = scale.greedy | ({"prompts": 32} if nodes > 50 else {})
        found[f"size {nodes}"] = cell("opt_tree", nodes, tree={**PLAIN, "max_depth": 16}, **few)
        found[f"Sequoia {nodes}"] = cell("sequoia", nodes, tree={"max_depth": 16}, **few)
    for threshold in scale.some((0, 0.1, 0.2, 0.3, 0.5, 0.8), (0, 0.5)):
        found[f"threshold {threshold}"] = cell("opt_tree", 50, tree={**PLAIN, "threshold": threshold}, **scale.greedy)
    return found


def section(r: Results, figures: Path) -> Section:
    claims = []

    def at_least(a: str, b: str, text: str, key: str) -> None:
        if a in r and b in r:
            claims.append(judge(text, difference(r[a], r[b]), REASONS.get(key, "")))

    parts = [
        "Tokens per step at equal nodes, greedy and at T = 1. *OPT-Tree* is the paper's (draft temperature 1, no "
        "threshold, depth 10); *sharpened* shapes the tree by the draft's law at temperature 0.6, this package's "
        "default for greedy requests. EAGLE-2 with its own depth (6) and with OPT-Tree's. EAGLE-1's tree has 25 "
        "nodes. E(A): mean sum of the path probabilities of a tree's nodes, of the sharpened law where that shapes it."
    ]
    columns = [c for c in (("25", ""), ("50", ""), ("25", " T=1")) if f"OPT-Tree {c[0]}{c[1]}" in r]
    rows = []
    for name in methods(0):
        values = [ratio(r[key]) if (key := f"{name} {n}{t}") in r else None for n, t in columns]
        rows.append((name, *values, ratio(r[f"{name} 25"], "expected").mean))
    heads = ("tree", *(f"N = {n}, T = {t[3:] or 0}" for n, t in columns), "E(A), N = 25, T = 0")
    parts.append(table(heads, rows))
    parts.append(
        "The paper's, MT-Bench, T = 0, and T = 1 with EAGLE heads as drafts; other models, so only the order compares:"
    )
    parts.append(table(("pair", "binary", "EAGLE-1 tree", "OPT-Tree"), [(k, *v) for k, v in THEIRS.items()]))
    parts.append(table(("target, T = 1", "EAGLE-1 tree", "OPT-Tree"), [(k, *v) for k, v in THEIRS_SAMPLED.items()]))
    for nodes, sampled in columns:
        where = f"N = {nodes}, T = {sampled[3:] or 0}"
        end = f" {nodes}{sampled}"
        at_least(
            "OPT-Tree" + end,
            "EAGLE-2, depth 10" + end,
            f"OPT-Tree >= EAGLE-2 of equal depth ({where})",
            "same depth" + sampled,
        )
        at_least("OPT-Tree" + end, "EAGLE-2" + end, f"OPT-Tree >= EAGLE-2 ({where})", "eagle2" + sampled)
        at_least("EAGLE-2" + end, "EAGLE-1 tree" + end, f"EAGLE-2 >= EAGLE-1's tree ({where})", "eagle1")
        at_least("EAGLE-1 tree" + end, "binary" + end, f"EAGLE-1's tree >= binary ({where})", "binary" + sampled)
        if not sampled:
            at_least(
                "OPT-Tree, sharpened" + end, "OPT-Tree" + end, f"sharpening helps a greedy target ({where})", "sharp"
            )
    if "OPT-Tree 25 T=1" in r:
        at_least("OPT-Tree 25", "OPT-Tree 25 T=1", "T = 1 gives fewer tokens per step than T = 0", "t1")

    sizes = sorted(int(name.split()[1]) for name in r if name.startswith("size "))
    parts.append(
        "Tokens per step over tree size, greedy, depth 16 (32 prompts at 100 nodes). Sequoia's vector is the "
        "bundled one, measured on texts of the pair's training set at T = 0 and 1 together. The paper reports "
        "growth up to some 130 nodes for a 68M draft and up to 500 for LLaMA-2-70B with a 7B draft (10 tokens per "
        "step), and OPT-Tree above Sequoia at every size."
    )
    rows = [(n, ratio(r[f"size {n}"]), ratio(r[f"Sequoia {n}"]), ratio(r[f"size {n}"], "forwards")) for n in sizes]
    parts.append(table(("nodes", "OPT-Tree", "Sequoia", "OPT-Tree's draft forwards per step"), rows))
    for n in sizes:
        at_least(f"size {n}", f"Sequoia {n}", f"OPT-Tree >= Sequoia (N = {n})", "sequoia")
    for small, large in pairwise(sizes):
        at_least(f"size {large}", f"size {small}", f"{large} nodes accept more than {small}", "growth")

    parts += _expectation(r, figures, claims)
    parts += _thresholds(r, claims)
    return Section("OPT-Tree (arXiv 2406.17276)", parts, claims)


def _expectation(r: Results, figures: Path, claims: list[Any]) -> list[str]:
    rows, images = [], []
    for name, what in (
        ("OPT-Tree 25", "T = 0"),
        ("OPT-Tree, sharpened 25", "T = 0, sharpened"),
        ("OPT-Tree 25 T=1", "T = 1"),
    ):
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
        claims.append(judge_fact(f"mean A grows with E(A) ({what})", rising, shown, REASONS["means"]))
    heads = ("", "steps", "predicted: mean E(A)", "observed: mean A", "correlation")
    return [
        "E(A), the sum of the path probabilities of a tree's nodes, against the number A of accepted tokens, 25 "
        "nodes; the dashed line is A = E(A), columns of fewer than ten steps are left blank. Bins of one token "
        "with fewer than 30 steps are left out of the claims.",
        table(heads, rows),
        "\n".join(images),
    ]


def _thresholds(r: Results, claims: list[Any]) -> list[str]:
    values = sorted(float(name.split()[1]) for name in r if name.startswith("threshold "))
    records = [r[f"threshold {value:g}"] for value in values]
    rows = []
    speed = {mu: [sum(x["tokens"]) / (sum(x["steps"]) + mu * sum(x["forwards"])) for x in records] for mu in MU}
    for place, (value, record) in enumerate(zip(values, records, strict=True)):
        rows.append((f"{value:g}", ratio(record), ratio(record, "forwards"), *(speed[mu][place] for mu in MU)))
    heads = ("threshold", "tokens per step", "draft forwards per step", *(f"speed at mu = {mu:g}" for mu in MU))
    for mu in MU:
        best = max(speed[mu])
        near = [value for value, x in zip(values, speed[mu], strict=True) if x >= 0.99 * best]
        claims.append(
            judge_fact(
                f"the best threshold lies between mu and 1 (mu = {mu:g})",
                any(mu <= value <= 1 for value in near),
                f"within 1 % of the best: {', '.join(f'{value:g}' for value in near)}",
                REASONS["threshold"],
            )
        )
    return [
        "The threshold sweep, 50 nodes, depth 10, greedy: a tree stops growing when a level adds no more than this "
        "to E(A). Speed is modelled as tokens / (1 + mu * draft forwards), in plain target forwards; mu is what a "
        "draft forward costs beside a target forward. The paper found 0.2 best for a 68M draft and 0.8 for EAGLE's.",
        table(heads, rows),
    ]


REASONS = {
    "same depth": (
        "OPT-Tree's E(A) is the larger one, but at T = 0 E(A) is an underestimate (predicted and observed below): the "
        "draft's law at temperature 1 spreads more than a greedy target does. All that EAGLE-2 does otherwise is to "
        "give no node more than ten children and no level more than ten inner nodes, which favours depth; the "
        "sharpened OPT-Tree accepts more than both"
    ),
    "eagle2": "as for EAGLE-2 of equal depth: E(A) with the draft's law at temperature 1 undervalues depth at T = 0",
    "same depth T=1": "both trees hold nearly the same nodes: E(A) differs by hundredths",
    "eagle2 T=1": "both trees hold nearly the same nodes: E(A) differs by hundredths",
    "means": "bins with few steps",
    "threshold": (
        "a level's gain in E(A) underestimates what it adds to a greedy target's acceptance (predicted and observed "
        "above), so smaller thresholds pay"
    ),
}
