"""C2T's classifier: which features it needs and how wide it must be (arXiv 2502.13652)."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers import c2t
from benchmarks.papers.bootstrap import Record, difference, ratio
from benchmarks.papers.calibration import write_gate
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import Claim, Source
from benchmarks.papers.saving import nodes_saved
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

FULL = "P+H+d"
TRAINED = {FULL: "PHd", "P+H": "PH", "P+d": "Pd"}  # several times each
BEST = {  # the best of several trainings: features, hidden units, how P is read
    FULL: ["PHd", 48, "paper"],
    "P+H": ["PH", 48, "paper"],
    "P+d": ["Pd", 48, "paper"],
    "H+d": ["Hd", 48, "paper"],
    "log P+H+d": ["PHd", 48, "log"],
    "h2": ["PHd", 2, "paper"],
    "h12": ["PHd", 12, "paper"],
}
SEEDS = 3
BETAS = (0.4, 0.8)  # of every training
WIDER = {"H+d": (0.2, 0.5), "h2": (0.5, 0.8), "h12": (0.5, 0.8)}  # of the best ones
SIZE = 30  # nodes of EAGLE-2, at whose acceptance curves are compared
THEIRS = {FULL: "3.92 with 0.7M nodes", "P+H": "3.92 with 0.9M", "P+d": "3.92 with 0.9M", "H+d": "0.98 with 3.3M"}
FEATURES = Source("Table 1, features", "0.7M nodes with all, 0.9M with two", True)
NO_PATH = Source("Table 1, H+d", "tau 0.98 with 3.3M nodes", headline=True)
WIDTH = Source("appendix B.3, hidden units", "tau 3.91 with 2, 4.02 with 48 (beta = 0.5)", headline=True)


def best(scale: Scale) -> Job:
    """The training of the best ones."""
    few = {"gates": {FULL: BEST[FULL]}, "prompts": 8, "tokens": 32, "nodes": 200, "seeds": 1}
    all_ = {"gates": BEST, "prompts": 64, "tokens": 64, "nodes": 1010, "seeds": SEEDS}
    return Job("calibration:c2t_gates", few if scale.quick else all_)


def learnt(scale: Scale) -> dict[str, Job]:
    about = {"prompts": 64, "tokens": 48, "nodes": 1010, "seeds": SEEDS, "hidden": 48}
    several = {name: Job("calibration:c2t_trainings", {"reads": reads} | about) for name, reads in TRAINED.items()}
    return {"best": best(scale)} | ({} if scale.quick else several)


def write_learnt(results: Mapping[str, Any], folder: Path) -> None:
    for name, one in results["best"].items():
        write_gate(name, one["weights"], folder, kind=one["features"])
    for name in [name for name in TRAINED if name in results]:
        for number, weights in enumerate(results[name]["weights"]):
            write_gate(f"{name} {number}", weights, folder)


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for name, job in learnt(scale).items():
        found[f"gate {name}"] = job
        shipped = f"{zlib.crc32(job.key.encode()):08x}"
        if name == "best":
            for gate in job.arguments["gates"]:
                for beta in scale.some(WIDER.get(gate, (0.35, 0.5, 0.65, 0.8)), (0.5, 0.8)):
                    tree = {"beta": beta, "gate": f"@{gate}.safetensors"}
                    own = cell("c2t", c2t.BUDGET, tree=tree, shipped=shipped, **scale.greedy)
                    found[f"best {gate}, {beta:g}"] = own
            continue
        for seed in range(SEEDS):
            for beta in BETAS:
                tree = {"beta": beta, "gate": f"@{name} {seed}.safetensors"}
                own = cell("c2t", c2t.BUDGET, tree=tree, shipped=shipped, **scale.few)
                found[f"{name}, training {seed}, {beta:g}"] = own
    eagle = c2t.jobs(scale)
    return found | {name: eagle[name] for name in eagle if name.startswith("EAGLE-2 ")}


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    heads = ("classifier", "held-out loss", "beta", "tokens per step", "nodes per step", "paper")
    rows = []
    for name, one in r["gate best"].items():
        losses = ", ".join(f"{loss:.4f}" for loss in one["losses"])
        for beta, record in c2t.curve(r, f"best {name},").items():
            rows.append((name, losses, f"{beta:g}", ratio(record), ratio(record, "nodes").mean, THEIRS.get(name)))
    constant = r["gate best"][FULL]["constant"]
    parts = [
        "What the classifier reads (P: path probability, H: entropy of the parent's law, d: depth; *log P* reads "
        "its logarithm, as the bundled one does) and its hidden units (48; h2 and h12 have 2 and 12). Trained as "
        "`train-gate` trains: EAGLE-2 trees of 1,010 nodes over texts of the pair's training set, eight negatives a "
        f"positive, until the held-out loss falls no more (a constant's is {constant:.4f}). The best of {SEEDS} "
        "trainings, whose losses are given:",
        table(heads, rows),
    ]
    if f"gate {FULL}" in r:
        parts += _trainings(r, claims)
    bests = {name: c2t.curve(r, f"best {name},") for name in r["gate best"]}
    if "h2" in bests:
        curves = [[list(bests[name].values())] for name in (FULL, "h2")]
        saved = nodes_saved(*curves, r[f"EAGLE-2 {SIZE}"])
        text = f"48 hidden units need fewer nodes than 2 (at EAGLE-2's acceptance with {SIZE} nodes, best of {SEEDS})"
        claims.append(WIDTH.judge(text, saved, SMALL, shown=saved.percent()))
    if "H+d" in bests:
        full, blind = bests[FULL][0.8], bests["H+d"][0.5]
        nodes = [ratio(one, "nodes").mean for one in (full, blind)]
        text = f"all three features accept more with {nodes[0]:.0f} nodes than H+d with {nodes[1]:.0f}"
        claims.append(NO_PATH.judge(text, difference(full, blind)))
    return Section(c2t.PAPER, "C2T: the classifier", parts, claims)


def _trainings(r: Results, claims: list[Claim]) -> list[str]:
    curves = {name: _curves(r, name) for name in TRAINED}
    rows = [
        (name, number, f"{r[f'gate {name}']['losses'][number]:.4f}", f"{beta:g}", ratio(one), ratio(one, "nodes").mean)
        for name, trainings in curves.items()
        for number, training in enumerate(trainings)
        for beta, one in training.items()
    ]
    at = r[f"EAGLE-2 {SIZE}"]
    past = {name: [list(one.values()) for one in curves[name] if _past(at, list(one.values()))] for name in TRAINED}
    for name in [name for name in TRAINED if name != FULL]:
        saved = nodes_saved(past[FULL], past[name], at)
        counts = f"{len(past[FULL])} and {len(past[name])} of {SEEDS} trainings reach it"
        where = f"at EAGLE-2's acceptance with {SIZE} nodes, {counts}"
        text = f"all three features need fewer nodes than {name} ({where})"
        claims.append(FEATURES.judge(text, saved, EQUAL, shown=saved.percent()))
    heads = ("classifier", "training", "held-out loss", "beta", "tokens per step", "nodes per step")
    return [
        "Each of three trainings from other seeds (trees behind 48 tokens of a prompt), 32 prompts. The lines compare "
        "geometric means over the trainings, and their intervals resample files and trainings.",
        table(heads, rows),
    ]


def _curves(r: Results, name: str) -> list[dict[float, Record]]:
    """Records by beta, one curve per training."""
    return [c2t.curve(r, f"{name}, training {number},") for number in range(len(r[f"gate {name}"]["losses"]))]


def _past(at: Record, curve: list[Record]) -> bool:
    """Return whether the curve has points on both sides, over the prompts that all share."""
    count = min(len(one["file"]) for one in (at, *curve))
    wanted, *found = (sum(one["tokens"][:count]) / sum(one["steps"][:count]) for one in (at, *curve))
    return min(found) <= wanted <= max(found)


EQUAL = "held-out losses are nearly equal, and trainings differ by as much"
SMALL = "two units learn nearly as much (their losses are as low)"
