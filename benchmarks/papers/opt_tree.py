"""OPT-Tree (Wang et al., arXiv 2406.17276): its trees against others of equal size, and over sizes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.papers.bootstrap import difference, ratio
from benchmarks.papers.jobs import Results, Work, cell
from benchmarks.papers.judging import OURS, Claim, Source
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

PAPER = "OPT-Tree (arXiv 2406.17276)"
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
ABSTRACT = 'abstract, "OPT-Tree outperforms the existing draft structures"; Tables 1 and 2'
TABLES = Source(ABSTRACT, "EAGLE's 2.47 -> 2.58 (7B, 68M) to 4.97 -> 7.74 (70B, 7B)", headline=True)
TABLES_BINARY = Source(ABSTRACT, "binary 2.12 -> 2.58 (7B, 68M) to 4.84 -> 7.74 (70B, 7B)", headline=True)
TABLES_STATIC = Source("Tables 1 and 2, rows binary and EAGLE", "2.12 -> 2.47 (7B, 68M) to 4.84 -> 4.97 (70B, 7B)")
SAMPLED = Source("Table 3, T = 1", "EAGLE's 3.37 -> 4.07 (7B) to 2.70 -> 2.89 (33B)", headline=True)
COOLER = Source("Table 3 and Figure 9, T = 1 beside T = 0", "4.36 -> 4.07 (7B, EAGLE)")
SIZES = Source("Figure 6", "a curve", headline=True)
GROWTH = Source("Figure 6, growth up to some 130 nodes for a 68M draft", "a curve")
TEN = Source('abstract, "it can generate more than ten tokens in a single step"', "10 at 500 nodes (70B, 7B)", True)
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


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for nodes in scale.some((25, 50, 60), (25,)):
        for name, (method, tree) in methods(0).items():
            if name != "EAGLE-1 tree" or nodes == 25:
                found[f"{name} {nodes}"] = cell(method, nodes, tree=tree, keep_steps=nodes == 25, **scale.greedy)
    for name, (method, tree) in methods(1).items():
        keep = name == "OPT-Tree"
        found[f"{name} 25 T=1"] = cell(method, 25, 1.0, tree=tree, keep_steps=keep, **scale.sampled)
    for nodes in scale.some((5, 10, 25, 50, 60, 100), (5, 25)):
        few = scale.greedy | ({"prompts": 32} if nodes > 60 else {})
        found[f"size {nodes}"] = cell("opt_tree", nodes, tree={**PLAIN, "max_depth": 16}, **few)
        found[f"Sequoia {nodes}"] = cell("sequoia", nodes, tree={"max_depth": 16}, **few)
    return found


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []

    def at_least(source: Source, a: str, b: str, where: str, reason: str = "") -> None:
        end = f" {where}"
        if a + end in r and b + end in r:
            size, _, t = where.partition(" T=")
            text = f"{a} >= {b} (N = {size}, T = {t or 0})"
            claims.append(source.judge(text, difference(r[a + end], r[b + end]), reason))

    parts = [
        "Tokens per step at equal nodes, greedy and at T = 1. *OPT-Tree* is the paper's (draft temperature 1, no "
        "threshold, depth 10); *sharpened* shapes the tree by the draft's law at temperature 0.6, this package's "
        "default for greedy requests. EAGLE-2 with its own depth (6) and with OPT-Tree's. EAGLE-1's tree has 25 "
        "nodes. E(A): mean sum of the path probabilities of a tree's nodes, of the sharpened law where that shapes it."
    ]
    columns = [where for where in ("25", "50", "60", "25 T=1") if f"OPT-Tree {where}" in r]
    rows = []
    for name in methods(0):
        values = [ratio(r[key]) if (key := f"{name} {where}") in r else None for where in columns]
        rows.append((name, *values, ratio(r[f"{name} 25"], "expected").mean))
    shown = (f"N = {where.split()[0]}, T = {where.partition('=')[2] or 0}" for where in columns)
    parts.append(table(("tree", *shown, "E(A), N = 25, T = 0"), rows))
    parts.append(
        "The paper's, MT-Bench, T = 0, and T = 1 with EAGLE heads as drafts; other models, so only the order compares:"
    )
    parts.append(table(("pair", "binary", "EAGLE-1 tree", "OPT-Tree"), [(k, *v) for k, v in THEIRS.items()]))
    parts.append(table(("target, T = 1", "EAGLE-1 tree", "OPT-Tree"), [(k, *v) for k, v in THEIRS_SAMPLED.items()]))
    for where in columns:
        greedy = "T=" not in where
        at_least(TABLES if greedy else SAMPLED, "OPT-Tree", "EAGLE-1 tree", where)
        at_least(TABLES_BINARY if greedy else OURS, "OPT-Tree", "binary", where)
        at_least(TABLES_STATIC if greedy else OURS, "EAGLE-1 tree", "binary", where)
        at_least(OURS, "OPT-Tree", "EAGLE-2, depth 10", where, WIDE if greedy else ALIKE)
        at_least(OURS, "OPT-Tree", "EAGLE-2", where, WIDE if greedy else ALIKE)
        at_least(OURS, "EAGLE-2", "EAGLE-1 tree", where)
        if greedy:
            at_least(OURS, "OPT-Tree, sharpened", "OPT-Tree", where)
    claims.append(
        COOLER.judge("T = 0 accepts more than T = 1 (N = 25)", difference(r["OPT-Tree 25"], r["OPT-Tree 25 T=1"]))
    )
    sizes = sorted(int(name.split()[1]) for name in r if name.startswith("size "))
    parts.append(
        "Tokens per step over tree size, greedy, depth 16 (32 prompts with 100). Sequoia's vector is the "
        "bundled one, measured on texts of the pair's training set at T = 0 and 1 together."
    )
    rows = [(n, ratio(r[f"size {n}"]), ratio(r[f"Sequoia {n}"]), ratio(r[f"size {n}"], "forwards")) for n in sizes]
    parts.append(table(("nodes", "OPT-Tree", "Sequoia", "OPT-Tree's draft forwards per step"), rows))
    for n in sizes:
        claims.append(SIZES.judge(f"OPT-Tree >= Sequoia (N = {n})", difference(r[f"size {n}"], r[f"Sequoia {n}"])))
    for small, large in pairwise(sizes):
        gain = difference(r[f"size {large}"], r[f"size {small}"])
        claims.append((GROWTH if large == 100 else OURS).judge(f"{large} nodes accept more than {small}", gain))
    most = ratio(r[f"size {sizes[-1]}"])
    claims.append(
        TEN.judge_fact(
            "more than ten tokens in a step",
            most.mean > 10,
            f"{most} with {sizes[-1]} nodes",
            FEW,
            otherwise="not reached",
        )
    )
    return Section(PAPER, PAPER, parts, claims)


FEW = "the draft is not powerful enough: a tenth of a small target, and trees of depth 16"
ALIKE = "both trees hold nearly the same nodes: E(A) differs by hundredths"
WIDE = (
    "OPT-Tree's E(A) is the larger one, but at T = 0 E(A) is an underestimate (predicted and observed below): the "
    "draft's law at temperature 1 spreads more than a greedy target does, which undervalues depth; the sharpened "
    "OPT-Tree accepts more than both"
)
