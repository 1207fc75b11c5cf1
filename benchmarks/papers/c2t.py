"""C2T (Huo et al., arXiv 2502.13652): its trees and chains against EAGLE-2's and fixed ones."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.papers.bootstrap import Record, ratio
from benchmarks.papers.calibration import joint_gate
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import OURS, Claim, Source
from benchmarks.papers.saving import nodes_saved
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

PAPER = "C2T (arXiv 2502.13652)"
WHOLE = "C2T, no second pruning"
MOST = 400
BUDGET = 150  # K = 15 times depth 10: the second pruning leaves no more
JOINT = (0.02, 0.08, 0.3)
FEWER = (
    'abstract, "reducing the total number of candidate tokens by 25%, while maintaining or even improving the '
    'acceptance length"'
)
SAVES = {  # EAGLE-2's nodes, where the paper saves a fifth or more
    ("C2T", 26): Source(FEWER + "; Table 4", "318k -> 227k, -29 % (N = 26)", headline=True),
    ("C2T", 100): Source("Table 1", "1.0M -> 782k, -22 % (N = 100)", headline=True),
}
AT = {  # where it saves less
    ("C2T", 60): Source("appendix A, Table 4", "629k -> 532k, -15 % (N = 60)", headline=True),
    ("C2T", 90): Source("Table 7", "935k -> 801k, -14 % (N = 90)", headline=True),
    (WHOLE, 200): Source("Table 2, no second pruning", "1.4M -> 1.2M, -14 % (13B, N = 200)", headline=True),
}
CHAIN = Source("Table 3, chains", "tau 2.12 with 117k nodes, fixed chain of 7: 2.10 with 140k", headline=True)
LONG = Source("Table 3, chains", "fixed chain of 9: tau 2.13 with 184k", headline=True)
DYMAX = Source("Table 3, DyMax", "tau 2.06 with 127k, C2T 2.12 with 117k")
MAX = (0.1, 0.3, 0.5)
DYJOINT = Source("Table 3, DyJoint", "tau 2.12 with 130k, C2T 117k")


def learnt(scale: Scale) -> dict[str, Job]:
    return {}


def write_learnt(results: Mapping[str, Record], folder: Path) -> None:
    for least in JOINT:
        joint_gate(folder, least)


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}

    def add(name: str, beta: float, nodes: int = BUDGET, **tree: object) -> None:
        found[f"{name} {beta:g}"] = cell("c2t", nodes, tree={"beta": beta, **tree}, **scale.greedy)

    for nodes in scale.some((10, 15, 20, 26, 30, 45, 60, 90, 100, 200), (10, 30)):
        found[f"EAGLE-2 {nodes}"] = cell("eagle2", nodes, tree={"top_k": 15, "max_depth": 10}, **scale.greedy)
    for beta in scale.some((0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9), (0.5, 0.8)):
        add("C2T", beta)
    for beta in scale.some((0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.5, 0.8)):
        add(WHOLE, beta, MOST, second_pruning=False)
    for length in scale.some((3, 5, 7, 9), (3, 5)):
        shape = {"shape": [1] * length, "children": "top_k"}
        found[f"chain {length}"] = cell("static_tree", length, tree=shape, **scale.greedy)
    for beta in scale.some((0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.7, 0.85, 0.9), (0.1, 0.5)):
        add("C2T chain", beta, mode="chain")
    for least in scale.some(JOINT, ()):
        tree = {"beta": 0.5, "gate": f"@joint {least:g}.safetensors", "mode": "chain"}
        found[f"DyJoint {least:g}"] = cell("c2t", BUDGET, tree=tree, **scale.greedy)
    for least in scale.some(MAX, ()):
        found[f"DyMax {least:g}"] = cell("dymax", BUDGET, tree={"least": least}, **scale.greedy)
    return found


def curve(r: Results, prefix: str) -> dict[float, Record]:
    """The records of a name by the number behind it."""
    found = {float(name.rsplit(" ", 1)[1]): r[name] for name in r if name.rsplit(" ", 1)[0] == prefix}
    return dict(sorted(found.items()))


def rows_of(r: Results, prefix: str, what: str) -> list[tuple[object, ...]]:
    return [
        (f"{prefix.rstrip(',')}, {what} {value:g}", ratio(one), ratio(one, "nodes").mean, ratio(one, "forwards").mean)
        for value, one in curve(r, prefix).items()
    ]


HEADS = ("tree", "tokens per step", "nodes per step", "draft forwards per step")


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    eagle = curve(r, "EAGLE-2")
    parts = [
        "Greedy. EAGLE-2 with K = 15 and depth 10, C2T with the same limits and K survivors a level. The classifier "
        "(3-48-1) is the bundled one, which reads the logarithm of the path probability. The paper's acceptance leaves "
        "out the bonus token, its node counts are totals of a benchmark.",
        table(HEADS, [*rows_of(r, "EAGLE-2", "N ="), *rows_of(r, "C2T", "beta ="), *rows_of(r, WHOLE, "beta =")]),
    ]
    for name in ("C2T", WHOLE):
        ours = list(curve(r, name).values())
        for nodes, at in ((nodes, at) for nodes, at in eagle.items() if name == WHOLE or nodes <= BUDGET):
            saved = nodes_saved([ours], [list(eagle.values())], at)
            text = f"{name}: at least 20 % fewer nodes at EAGLE-2's acceptance (N = {nodes:g})"
            source = SAVES.get((name, int(nodes)), OURS)
            claims.append(source.judge(text, saved, VARIES, least=0.2, shown=saved.percent()))
            text = f"{name}: fewer nodes at EAGLE-2's acceptance (N = {nodes:g})"
            claims.append(AT.get((name, int(nodes)), OURS).judge(text, saved, shown=saved.percent()))
    parts += [
        "Chain mode, with a chain of fixed length beside it, and with DyJoint, which stops where the path "
        "probability falls below a threshold, and DyMax, which stops where the probability of the token does:",
        table(
            HEADS,
            [
                *rows_of(r, "chain", "length"),
                *rows_of(r, "C2T chain", "beta ="),
                *rows_of(r, "DyJoint", "threshold"),
                *rows_of(r, "DyMax", "threshold"),
            ],
        ),
    ]
    chains, gated, joint, most = (curve(r, name) for name in ("chain", "C2T chain", "DyJoint", "DyMax"))
    for length in (7, 9) if 9 in chains else (max(chains),):
        saved = nodes_saved([list(gated.values())], [list(chains.values())], chains[length])
        text = f"C2T's chains need fewer nodes than a fixed chain of {length:g} at its acceptance"
        claims.append((LONG if length == 9 else CHAIN).judge(text, saved, ENDS, shown=saved.percent()))
    if joint:
        at = joint[0.02]
        saved = nodes_saved([list(gated.values())], [list(joint.values())], at)
        text = "C2T's chains need fewer nodes than DyJoint's (threshold 0.02) at their acceptance"
        claims.append(DYJOINT.judge(text, saved, SAME, shown=saved.percent()))
    if most:
        saved = nodes_saved([list(gated.values())], [list(most.values())], most[0.1])
        text = "C2T's chains need fewer nodes than DyMax's (threshold 0.1) at their acceptance"
        claims.append(DYMAX.judge(text, saved, shown=saved.percent()))
    return Section(PAPER, PAPER, parts, claims)


VARIES = "the paper's gate reads P, and is trained on its own models"
ENDS = "the longest C2T chains end at depth 10, and accept no more than the fixed chain"
SAME = "the path probability is the classifier's strongest feature"
