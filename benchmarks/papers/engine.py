"""The same cells in the engine: does the batched simulation measure what the engine does?"""

from pathlib import Path
from typing import Any

from benchmarks.papers.jobs import Job, Results, cell
from benchmarks.papers.judging import judge_fact, ratio
from benchmarks.papers.opt_tree import PLAIN
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

BINARY = {"shape": "binary"}
CELLS = {  # method, nodes, temperature, rule, tree
    "OPT-Tree, 25 nodes, T = 0": ("opt_tree", 25, 0.0, "target_only", PLAIN),
    "EAGLE-2, 25 nodes, T = 0": ("eagle2", 25, 0.0, "target_only", {}),
    "RRSw, binary, 14 nodes, T = 0.6": ("static_tree", 14, 0.6, "rrsw", {**BINARY, "children": "without_replacement"}),
    "SpecHub, binary, 14 nodes, T = 1": ("static_tree", 14, 1.0, "spechub", BINARY),
}


def jobs(scale: Scale) -> dict[str, Job]:
    found = {}
    for name, (method, nodes, temperature, rule, tree) in () if scale.quick else CELLS.items():
        own = scale.sampled if temperature else scale.greedy
        found[f"ours {name}"] = cell(method, nodes, temperature, rule=rule, tree=tree, **own)
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
        sampled = CELLS[name][2] > 0
        ours, engine = ratio(r[f"ours {name}"]), r[f"engine {name}"]
        rows.append((name, ours, engine["tokens_per_step"], int(sum(r[f"ours {name}"]["steps"])), int(engine["steps"])))
        claims.append(
            judge_fact(
                f"the simulation measures what the engine does ({name})",
                abs(engine["tokens_per_step"] - ours.mean)
                <= (2**0.5 * (ours.high - ours.low) / 2 if sampled else 1e-9),
                f"{engine['tokens_per_step'] - ours.mean:+.3f}",
                "the engine's figure is further away than draws explain",
            )
        )
    heads = ("cell", "tokens per step, simulated", "tokens per step, engine", "steps, simulated", "steps, engine")
    text = (
        "The same prompts and options in the engine, in batches of 16, unseeded. At T = 0 both must take the same "
        "steps; at T > 0 both draw, so the difference may be 1.4 times the half interval of one."
    )
    return Section(
        "Check against the engine", [text, table(heads, rows)] if rows else ["Not part of a quick run."], claims
    )
