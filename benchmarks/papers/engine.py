"""The same cells in the engine: does the batched simulation measure what the engine does?"""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.papers.bootstrap import ratio
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import OURS
from benchmarks.papers.opt_tree import PLAIN
from benchmarks.papers.scale import Scale
from benchmarks.papers.spechub import DRAWS
from benchmarks.papers.writing import Section, table

BINARY = {"shape": "binary"}
CELLS = {  # method, nodes, temperature, rule, tree
    "OPT-Tree, 25 nodes, T = 0": ("opt_tree", 25, 0.0, "target_only", PLAIN),
    "EAGLE-2, 25 nodes, T = 0": ("eagle2", 25, 0.0, "target_only", {}),
    "RRSw, binary, 14 nodes, T = 0.6": ("static_tree", 14, 0.6, "rrsw", {**BINARY, "children": "without_replacement"}),
    "SpecHub, binary, 14 nodes, T = 1": ("static_tree", 14, 1.0, "spechub", BINARY),
}


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for name, (method, nodes, temperature, rule, tree) in () if scale.quick else CELLS.items():
        own = scale.sampled if temperature else scale.greedy
        for draw in range(DRAWS if temperature else 1):
            found[f"ours {name} #{draw}"] = cell(method, nodes, temperature, rule=rule, tree=tree, draw=draw, **own)
        spec = {"method": method, "num_speculative_tokens": nodes, "rejection_sample_method": rule, "tree": tree}
        found[f"engine {name}"] = Job("engine:measured", {"spec": spec, "temperature": temperature, **own})
    return found


def measured(_: Path, *, spec: dict[str, Any], temperature: float, prompts: int, tokens: int) -> dict[str, float]:
    from benchmarks import tokens_per_step

    tokens_per_step.NEW_TOKENS = tokens
    tree = {**spec["tree"], "budget": None}
    llm = tokens_per_step.start({**spec, "model": str(tokens_per_step.PAIR / "draft"), "tree": tree})
    found = tokens_per_step.measure(llm, tokens_per_step.prompts(prompts), temperature)
    llm.llm_engine.engine_core.shutdown()
    return found


def section(r: Results, figures: Path) -> Section:
    rows, claims = [], []
    for name in CELLS:
        if f"engine {name}" not in r:
            continue
        ours = [ratio(one).mean for key, one in r.items() if key.startswith(f"ours {name} #")]
        mean, engine = statistics.mean(ours), r[f"engine {name}"]["tokens_per_step"]
        spread = statistics.stdev(ours) if len(ours) > 1 else 0.0
        rows.append((name, mean, f"{spread:.3f}", engine, int(r[f"engine {name}"]["steps"])))
        near = abs(engine - mean) <= (3 * spread if spread else 1e-9)
        text = f"the simulation measures what the engine does ({name})"
        claims.append(OURS.judge_fact(text, near, f"{engine - mean:+.3f}", "further away than draws explain"))
    heads = ("cell", "tokens per step, simulated", "spread over draws", "tokens per step, engine", "steps, engine")
    text = (
        "The same prompts and options in the engine, in batches of 16, unseeded. At T = 0 both must take the same "
        f"steps; at T > 0 both draw: the engine's figure may be three standard deviations of {DRAWS} simulated draws "
        "away."
    )
    return Section(
        "", "Check against the engine", [text, table(heads, rows)] if rows else ["Not part of a quick run."], claims
    )
