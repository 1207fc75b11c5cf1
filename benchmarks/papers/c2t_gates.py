"""C2T's classifier: which features it needs and how wide it must be, over several trainings (arXiv 2502.13652)."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers import c2t
from benchmarks.papers.bootstrap import Record, pooled, ratio
from benchmarks.papers.calibration import write_gates
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import Claim, Source
from benchmarks.papers.saving import nodes_saved
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

FULL, BLIND, NARROW = "P+H+d", "H+d", "2 units"
GATES = {  # name -> the features that it may read, hidden units, paper: tau and nodes
    FULL: ("PHd", 48, "3.92 with 0.7M nodes"),
    "P+H": ("PH", 48, "3.92 with 0.9M nodes"),
    "P+d": ("Pd", 48, "3.92 with 0.9M nodes"),
    BLIND: ("Hd", 48, "0.98 with 3.3M nodes"),
    NARROW: ("PHd", 2, "tau 3.91 at beta = 0.5, 4.02 with 48"),
}
SEEDS = 3
BETAS = (0.4, 0.8)
SIZES = (10, 15, 20, 30)  # EAGLE-2's, whose acceptance the curves are compared at: the largest that all of them go past
FEATURES = Source("Table 1, features of the classifier, 3.92 in each row", "0.7M nodes with all, 0.9M with two", True)
NO_PATH = Source("Table 1, H+d", "tau 0.98 with 3.3M nodes", headline=True)
WIDTH = Source("appendix B.3, hidden units", "tau 3.91 with 2, 4.02 with 48 (beta = 0.5)", headline=True)


def learnt(scale: Scale) -> dict[str, Job]:
    few = {"prompts": 8, "tokens": 32, "nodes": 200, "seeds": 1}
    all_ = {"prompts": 64, "tokens": 48, "nodes": 1010, "seeds": SEEDS}
    return {
        name: Job("calibration:c2t_gates", {"reads": reads, "hidden": hidden} | (few if scale.quick else all_))
        for name, (reads, hidden, _) in GATES.items()
        if not scale.quick or name == FULL
    }


def write_learnt(results: Mapping[str, Any], folder: Path) -> None:
    for name, trained in results.items():
        write_gates(name, trained, folder)


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for name, job in learnt(scale).items():
        found[f"gate {name}"] = job
        shipped = f"{zlib.crc32(job.key.encode()):08x}"
        for seed in range(1 if scale.quick else SEEDS):
            for beta in (0.5,) if name == BLIND else scale.some(BETAS, (0.5,)):
                tree = {"beta": beta, "gate": f"@{name} {seed}.safetensors"}
                found[f"{name}, training {seed}, {beta:g}"] = cell(
                    "c2t", c2t.BUDGET, tree=tree, shipped=shipped, **scale.few
                )
    eagle = c2t.jobs(scale)
    return found | {name: eagle[name] for name in eagle if name.startswith("EAGLE-2 ")}


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    rows = []
    for name in GATES:
        if f"gate {name}" not in r:
            continue
        for number, loss in enumerate(r[f"gate {name}"]["losses"]):
            for beta, one in _curves(r, name)[number].items():
                rows.append((name, number, f"{loss:.4f}", f"{beta:g}", ratio(one), ratio(one, "nodes").mean))
    constant = r[f"gate {FULL}"]["constant"]
    parts = [
        "What the classifier reads (P: path probability, H: entropy of the parent's law, d: depth; in the paper's "
        f"own form) and how many hidden units it has (48 but for *{NARROW}*). Trained as `train-gate` trains "
        "(EAGLE-2 trees of 1,010 nodes over texts of the pair's training set, eight negatives a positive, until the "
        f"held-out loss falls no more), {SEEDS} times from different seeds; a constant's loss is {constant:.4f}. The "
        "lines compare geometric means over the trainings; their intervals resample files and trainings.",
        table(("classifier", "training", "held-out loss", "beta", "tokens per step", "nodes per step"), rows),
    ]
    trained = [name for name in GATES if f"gate {name}" in r]
    eagle = c2t.curve(r, "EAGLE-2")
    for name in [name for name in trained if name not in (FULL, BLIND)]:
        ours, theirs = ([list(one.values()) for one in _curves(r, n)] for n in (FULL, name))
        reached = [n for n in SIZES if n in eagle and _pass(eagle[n], [*ours, *theirs])]
        if not reached:
            continue
        saved = nodes_saved(ours, theirs, eagle[max(reached)])
        source, what = (WIDTH, "48 hidden units") if name == NARROW else (FEATURES, "all three features")
        text = f"{what} need fewer nodes than {name} (at the acceptance of EAGLE-2, N = {max(reached)})"
        claims.append(source.judge(text, saved, EQUAL, shown=saved.percent()))
    if BLIND in trained:
        pairs = [(a[0.8], b[0.5]) for a, b in zip(_curves(r, FULL), _curves(r, BLIND), strict=False)]
        nodes = [sum(ratio(pair[side], "nodes").mean for pair in pairs) / len(pairs) for side in (0, 1)]
        text = f"all three features accept more with {nodes[0]:.0f} nodes than {BLIND} with {nodes[1]:.0f}"
        claims.append(NO_PATH.judge(text, pooled(pairs)))
    return Section(c2t.PAPER, "C2T: the classifier", parts, claims)


def _curves(r: Results, name: str) -> list[dict[float, Record]]:
    """Records by beta, one curve per training."""
    count = len(r[f"gate {name}"]["losses"])
    return [c2t.curve(r, f"{name}, training {number},") for number in range(count)]


def _pass(at: Record, curves: list[list[Record]]) -> bool:
    """Whether every curve has points on both sides."""
    wanted, found = ratio(at).mean, [[ratio(one).mean for one in curve] for curve in curves]
    return all(min(tokens) <= wanted <= max(tokens) for tokens in found)


EQUAL = "held-out losses are nearly equal, and trainings differ by as much"
