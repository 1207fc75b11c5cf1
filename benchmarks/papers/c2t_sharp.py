"""C2T where one draft temperature shapes the trees already: does a classifier still save nodes?"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers import c2t
from benchmarks.papers.calibration import write_gate
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import OURS, Claim
from benchmarks.papers.saving import nodes_saved
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE

SHARP = {"draft_temperature": GREEDY_DRAFT_TEMPERATURE}
EAGLE, GATED = "EAGLE-2, sharpened", "C2T, sharpened"
SIZES = (10, 20, 30, 60, 100)
BETAS = (0.2, 0.35, 0.5, 0.65, 0.8)


def learnt(scale: Scale) -> dict[str, Job]:
    """The gate: as the bundled one, of the sharpened distribution."""
    gates = {GATED: ["PHd", 48, "log"]}
    about = {"prompts": 64, "tokens": 48, "nodes": 1010, "seeds": 2, **SHARP}
    return {} if scale.quick else {"gate": Job("calibration:c2t_gates", {"gates": gates, **about})}


def write_learnt(results: Mapping[str, Any], folder: Path) -> None:
    for one in results.values():
        write_gate(GATED, one[GATED]["weights"], folder, kind=one[GATED]["features"])


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for nodes in scale.some(SIZES, (10, 30)):
        tree = {"top_k": 15, "max_depth": 10, **SHARP}
        found[f"{EAGLE} {nodes}"] = cell("eagle2", nodes, tree=tree, **scale.greedy)
    for job in learnt(scale).values():
        shipped = f"{zlib.crc32(job.key.encode()):08x}"
        for beta in BETAS:
            tree = {"beta": beta, "gate": f"@{GATED}.safetensors", **SHARP}
            found[f"{GATED} {beta:g}"] = cell("c2t", c2t.BUDGET, tree=tree, shipped=shipped, **scale.greedy)
    plain = c2t.jobs(scale)
    return found | {name: plain[name] for name in plain if name.rsplit(" ", 1)[0] in ("EAGLE-2", "C2T")}


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    curves = {name: list(c2t.curve(r, name).values()) for name in ("EAGLE-2", "C2T", EAGLE, GATED)}
    temperature = f"{GREEDY_DRAFT_TEMPERATURE:g}"
    for a, b in ((EAGLE, "EAGLE-2"), (EAGLE, "C2T"), (GATED, EAGLE), (GATED, "C2T")):
        for nodes in (30, 60, 100):
            if curves[a] and f"EAGLE-2 {nodes}" in r:
                saved = nodes_saved([curves[a]], [curves[b]], r[f"EAGLE-2 {nodes}"])
                text = f"{a}: fewer nodes than {b} at EAGLE-2's acceptance (N = {nodes})"
                claims.append(OURS.judge(text, saved, shown=saved.percent()))
    parts = [
        f"EAGLE-2 shaped by the draft's distribution at temperature {temperature}, without a classifier, and C2T with "
        "a gate that is trained and read on that distribution, on log P:",
        table(c2t.HEADS, [*c2t.rows_of(r, EAGLE, "N ="), *c2t.rows_of(r, GATED, "beta =")]),
    ]
    return Section(c2t.PAPER, "C2T on a sharpened distribution", parts, claims)
