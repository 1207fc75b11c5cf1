"""SpecHub (Sun et al., arXiv 2411.05289): its trees against those of the rules before it."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.bootstrap import difference, pooled, ratio
from benchmarks.papers.calibration import write_vector
from benchmarks.papers.jobs import Job, Results, Work, draws
from benchmarks.papers.judging import OURS, Claim, Source
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

PAPER = "SpecHub (arXiv 2411.05289)"
RULES = {  # name -> (children, rule)
    "RRS": ("iid", "rrs"),
    "RRSw": ("without_replacement", "rrsw"),
    "SpecHub": (None, "spechub"),
    "traversal": ("without_replacement", "traversal"),
}
THREE = ("RRS", "RRSw", "SpecHub")
DEPTHS = {2: 2, 3: 6, 4: 14, 5: 30}  # the paper's 2^d counts the root: d - 1 drafted levels -> nodes
SEQUOIA = {32: 31}  # biSeqN counts the root
HOT = 1.0  # where the rules differ most
TERNARY = {4: 39}
THEIRS = {  # JF68M -> LLaMA-2-7B, CNN: tokens per step of RRS, RRSw, SpecHub
    (0.6, 2): (1.554, 1.600, 1.616),
    (0.6, 3): (1.848, 1.969, 1.986),
    (0.6, 4): (2.051, 2.169, 2.246),
    (0.6, 5): (2.139, 2.315, 2.403),
    (1.0, 2): (1.543, 1.552, 1.600),
    (1.0, 3): (1.838, 1.879, 1.983),
    (1.0, 4): (1.976, 2.044, 2.211),
    (1.0, 5): (2.069, 2.138, 2.310),
}
THEIRS_SEQUOIA = {32: (2.120, 2.160, 2.345)}  # biSeqN at T = 1, as above
MORE = (
    'abstract, "consistently generates 0.05-0.27 and 0.02-0.16 more tokens per step than RRS and RRS without '
    'replacement"'
)
OVER_RRS, OVER_RRSW = Source(MORE, "+0.05 to +0.27", headline=True), Source(MORE, "+0.02 to +0.16", headline=True)
ORDER = Source("tables of batch efficiency, columns RRS and RRSw", "2.051 -> 2.169 (2^4, T = 0.6, CNN)")
HALF = "Figure 1, batch efficiency"
HALVES = {  # T, the rule with twice the nodes; at T = 0.6 the paper's own RRSw is ahead
    ("1", "RRSw"): Source(HALF, "SpecHub 2^4 2.211, RRSw 2^5 2.138 (T = 1, CNN)", headline=True),
    ("1", "RRS"): Source(HALF, "SpecHub 2^4 2.211, RRS 2^5 2.069 (T = 1, CNN)", headline=True),
    ("0.6", "RRS"): Source(HALF, "SpecHub 2^4 2.246, RRS 2^5 2.139 (T = 0.6, CNN)", headline=True),
    ("0.6", "RRSw"): OURS,
}
BISEQ = Source("tables of batch efficiency, rows biSeq", "2.160 -> 2.345 (biSeq32, T = 1, CNN)", True)
THIRD = Source(
    "tables of batch efficiency, rows 2^5 and 3^4",
    "2.474 -> 2.662 (T = 1), 2.682 -> 2.724 (T = 0.6), 160M, CNN",
    headline=True,
)
CLOSE = ("RRSw", "SpecHub")
"""Rules that differ by less than one set of random numbers resolves where the draft is not sharp."""
WARM = 0.6
DRAWS = 4


def learnt(scale: Scale) -> dict[str, Job]:
    """Sequoia's vector of each rule, with two children."""
    found = {}
    for t in scale.some((HOT,), ()):
        for name in THREE:
            children, rule = RULES[name]
            about = {"rule": rule, "children": children, "width": 2, "temperature": t, "prompts": 64, "tokens": 32}
            found[f"{name} {t:g}"] = Job("calibration:acceptance_rates", about)
    return found


def write_learnt(results: Mapping[str, Any], folder: Path) -> None:
    for name, vector in results.items():
        write_vector(name, vector, folder)


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for t in scale.some((0.3, 0.6, 1.0), (0.6,)):
        for depth in scale.some(tuple(DEPTHS), (2, 3)):
            for name, (children, rule) in RULES.items():
                tree = {"shape": "binary"} | ({"children": children} if children else {})
                slow = rule == "traversal"
                own = scale.sampled | ({"prompts": min(24, scale.prompts)} if slow else {})
                count = scale.draws(DRAWS) if name in CLOSE and t >= WARM else 1
                found[f"{name} {depth} {t:g}"] = draws(
                    count, "static_tree", DEPTHS[depth], t, rule=rule, tree=tree, **own
                )
    for name, job in learnt(scale).items():
        rule, t = name.split()
        children = RULES[rule][0]
        for size, nodes in SEQUOIA.items():
            tree = {"vector": f"@{name}.json", "max_depth": 16} | ({"children": children} if children else {})
            key = {"shipped": f"{zlib.crc32(job.key.encode()):08x}", "rule": RULES[rule][1], "tree": tree}
            count = scale.draws(DRAWS) if rule in CLOSE else 1
            found[f"biSeq {rule} {size} {t}"] = draws(count, "sequoia", nodes, float(t), **key, **scale.few)
    for t in scale.some((WARM, HOT), ()):
        for depth, nodes in TERNARY.items():
            tree = {"shape": "ternary", "children": "without_replacement"}
            cells = draws(scale.draws(DRAWS), "static_tree", nodes, t, rule="rrsw", tree=tree, **scale.few)
            found[f"ternary {depth} {t:g}"] = cells
    return found | {f"vector {name}": job for name, job in learnt(scale).items()}


def section(r: Results, figures: Path) -> Section:
    temperatures = sorted({name.split()[2] for name in r if name.startswith("RRS ")}, key=float)
    depths = sorted({int(name.split()[1]) for name in r if name.startswith("RRS ")})
    claims: list[Claim] = []
    parts = [
        "Tokens per step on full binary trees. Depth counts the root's level, as in the paper: 2, 6, 14 and 30 "
        "nodes. Draft and target at the same temperature. Traversal verification, on the same trees as RRSw, is "
        "slow to simulate and decodes the first 24 prompts only."
    ]
    rows = []
    for t in temperatures:
        for depth in depths:
            theirs = THEIRS.get((float(t), depth))
            shown = " / ".join(f"{x:.3f}" for x in theirs) if theirs else None
            rows.append((t, depth, *(ratio(r[f"{name} {depth} {t}"]) for name in RULES), shown))
    parts.append(table(("T", "depth", *RULES, "paper: RRS / RRSw / SpecHub (68M -> LLaMA-2-7B, CNN)"), rows))
    lines = (
        ("SpecHub", "RRS", OVER_RRS),
        ("SpecHub", "RRSw", OVER_RRSW),
        ("RRSw", "RRS", ORDER),
        ("traversal", "RRSw", OURS),
    )
    for t in temperatures:
        for a, b, source in lines:
            gain = pooled([(r[f"{a} {depth} {t}"], r[f"{b} {depth} {t}"]) for depth in depths])
            text = f"{a} > {b} in tokens per step (T = {t}, mean over depths)"
            claims.append(source.judge(text, gain, FEW if a == "traversal" else EXACT))
    for (t, other), source in HALVES.items():
        if f"SpecHub 4 {t}" in r:
            gain = difference(r[f"SpecHub 4 {t}"], r[f"{other} 5 {t}"])
            claims.append(source.judge(f"SpecHub with 14 nodes >= {other} with 30 (T = {t})", gain, DEEP))
    parts += _sequoia(r, claims) + _ternary(r, claims)
    return Section(PAPER, PAPER, parts, claims)


def _sequoia(r: Results, claims: list[Claim]) -> list[str]:
    if f"vector RRS {HOT:g}" not in r:
        return []
    rows = []
    for size in SEQUOIA:
        theirs = THEIRS_SEQUOIA.get(size)
        shown = " / ".join(f"{x:.3f}" for x in theirs) if theirs else None
        rows.append((f"biSeq{size}", *(ratio(r[f"biSeq {rule} {size} {HOT:g}"]) for rule in THREE), shown))
    for other in ("RRSw", "RRS"):
        pairs = [(r[f"biSeq SpecHub {size} {HOT:g}"], r[f"biSeq {other} {size} {HOT:g}"]) for size in SEQUOIA]
        source = BISEQ if other == "RRSw" else BISEQ._replace(headline=False)
        text = f"SpecHub > {other} on binary Sequoia trees (T = {HOT:g}, biSeq32)"
        claims.append(source.judge(text, pooled(pairs), EXACT))
    shares = (f"{rule} {' and '.join(f'{x:.3f}' for x in r[f'vector {rule} {HOT:g}'])}" for rule in THREE)
    return [
        f"T = {HOT:g}, Sequoia's trees with at most two children, each for the rule's own vector (biSeqN, N with the "
        "root), which `vllm-adaptive-tree calibrate sequoia --rule` measures for any pair. Measured on texts of the "
        f"pair's training set (first and second child): {', '.join(shares)}. 32 prompts.",
        table(("tree", *THREE, "paper: RRS / RRSw / SpecHub"), rows),
    ]


def _ternary(r: Results, claims: list[Claim]) -> list[str]:
    rows = []
    for name in [name for name in r if name.startswith("ternary ")]:
        _, depth, t = name.split()
        wider, nodes = int(depth) + 1, TERNARY[int(depth)]
        binary, more = r[f"SpecHub {wider} {t}"], DEPTHS[wider]
        rows.append((t, f"3^{depth}, {nodes} nodes", ratio(r[name]), f"2^{wider}, {more} nodes", ratio(binary)))
        text = f"SpecHub on 2^{wider} with {more} nodes > RRSw on 3^{depth} with {nodes} (T = {t})"
        claims.append(THIRD.judge(text, difference(binary, r[name])))
    if not rows:
        return []
    heads = ("T", "ternary tree", "RRSw", "binary tree", "SpecHub")
    return [
        "Ternary trees, for which SpecHub has no rule (32 prompts), beside binary ones:",
        table(heads, rows),
    ]


EXACT = "the exact acceptance of a pair is higher, by less than these draws resolve"
FEW = "24 prompts do not resolve its gain"
DEEP = "a level more is worth more here than a better second draft"
