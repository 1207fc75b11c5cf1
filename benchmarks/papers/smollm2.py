"""The papers' headlines on SmolLM2-135M-Instruct with a draft of three of its layers, beside the bundled pair's.

Prompts are HumanEval's and chat that the model wrote, none of which the draft was trained on; each is a file of its own
for the bootstrap. Sequoia's vectors and C2T's classifier are learnt from other prompts of HumanEval.
"""

import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.bootstrap import Estimate, difference
from benchmarks.papers.calibration import write_gate, write_vector
from benchmarks.papers.jobs import Job, Results, Work, cell, draws
from benchmarks.papers.judging import OURS, Claim
from benchmarks.papers.models import Subject
from benchmarks.papers.saving import nodes_saved
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import table
from benchmarks.smollm2 import held_out, humaneval
from vllm_adaptive_tree.bench.demo_models import chat_prompts

LEARNT_FROM = 24  # prompts
PLAIN = {"threshold": 0, "draft_temperature": 1}
RULES = {"RRS": ("iid", "rrs"), "RRSw": ("without_replacement", "rrsw"), "SpecHub": (None, "spechub")}
SIZES, BETAS = (15, 26, 45, 60), (0.05, 0.1, 0.2, 0.35, 0.5)
DRAWS = 2


class Line(NamedTuple):
    """`a` accepts more tokens per step than `b`; for C2T, `a` needs fewer nodes at the acceptance of `b`."""

    a: str
    b: str
    bundled: str  # the line of the bundled pair


LINES = (
    Line("OPT-Tree 0", "EAGLE-1 tree 0", "OPT-Tree >= EAGLE-1 tree (N = 25, T = 0)"),
    Line("OPT-Tree 0", "binary 0", "OPT-Tree >= binary (N = 25, T = 0)"),
    Line("OPT-Tree, deep 0", "Sequoia 0", "OPT-Tree >= Sequoia (N = 25)"),
    Line("OPT-Tree 1", "EAGLE-1 tree 1", "OPT-Tree >= EAGLE-1 tree (N = 25, T = 1)"),
    *(
        Line(f"DySpec {t}", f"{other} 64 {t}", f"DySpec > {other} (64 nodes, T = {t})")
        for t in ("0", "0.6")
        for other in ("Sequoia", "SpecInfer")
    ),
    *(
        Line("C2T", f"EAGLE-2 {nodes}", f"C2T: {more}fewer nodes at EAGLE-2's acceptance (N = {nodes})")
        for nodes, more in ((26, "at least 20 % "), (60, ""))
    ),
    Line("4x2x2x1", "1x1x1x1", "alpha: 4x2x2x1 > 1x1x1x1 (T = 0.7)"),
    Line("2+4x3x1x1", "4x2x2x1", "alpha: 2+4x3x1x1 > 4x2x2x1 (T = 0.7)"),
    *(
        Line(f"SpecHub {t}", f"{other} {t}", f"SpecHub > {other} in tokens per step (T = {t}, mean over depths)")
        for t in ("0.6", "1")
        for other in ("RRS", "RRSw")
    ),
)


def subject(model: Path, draft: Path, code: Path, chat: Path, scale: Scale) -> Subject:
    """`code`, `chat`: files of prompts, as of `benchmarks.smollm2`."""
    half = scale.prompts // 2
    questions = humaneval(code, half + LEARNT_FROM)
    asked = chain.from_iterable(zip(questions[:half], held_out(chat, half), strict=False))
    return Subject(model, draft, chat_prompts(model, asked), chat_prompts(model, questions[half:]))


def learnt(scale: Scale) -> dict[str, Job]:
    about = {"children": "without_replacement", "width": 8, "prompts": LEARNT_FROM, "tokens": scale.tokens}
    rates = "calibration:acceptance_rates"
    found = {f"sequoia {t:g}": Job(rates, {"rule": "rrsw", "temperature": t, **about}) for t in (0.0, 0.6)}
    gate = {"gate": ["PHd", 48, "log"]}
    asked = {"prompts": LEARNT_FROM, "tokens": scale.tokens, "nodes": 150, "seeds": 3}
    return found | {"gate": Job("calibration:c2t_gates", {"gates": gate, **asked})}


def write_learnt(results: Mapping[str, Any], folder: Path) -> None:
    for name, found in results.items():
        if name == "gate":
            write_gate("gate", found["gate"]["weights"], folder, kind="log")
        else:
            write_vector(name, found, folder)


def jobs(scale: Scale) -> dict[str, Work]:
    own, learning = scale.sampled, learnt(scale)

    def by(name: str) -> str:
        return f"{zlib.crc32(learning[name].key.encode()):08x}"

    found: dict[str, Work] = {}
    for t in (0.0, 1.0):
        found[f"OPT-Tree {t:g}"] = cell("opt_tree", 25, t, tree=PLAIN, **own)
        for name, shape in (("binary", "binary"), ("EAGLE-1 tree", "eagle1")):
            found[f"{name} {t:g}"] = cell("static_tree", 25, t, tree={"shape": shape, "children": "top_k"}, **own)
    found["OPT-Tree, deep 0"] = cell("opt_tree", 25, tree={**PLAIN, "max_depth": 16}, **own)
    vector = {"vector": "@sequoia 0.json", "max_depth": 16}
    found["Sequoia 0"] = cell("sequoia", 25, tree=vector, shipped=by("sequoia 0"), **own)
    fork = {"shape": [8, *[1] * 7], "children": "iid"}
    for t in (0.0, 0.6):
        found[f"DySpec {t:g}"] = cell("dyspec", 64, t, rule="rrsw", tree={"mode": "heap"}, **own)
        vector = {"vector": f"@sequoia {t:g}.json", "max_depth": 16}
        shipped = by(f"sequoia {t:g}")
        found[f"Sequoia 64 {t:g}"] = cell("sequoia", 64, t, rule="rrsw", tree=vector, shipped=shipped, **own)
        found[f"SpecInfer 64 {t:g}"] = cell("static_tree", 64, t, rule="rrs", tree=fork, **own)
    for nodes in SIZES:
        found[f"EAGLE-2 {nodes}"] = cell("eagle2", nodes, tree={"top_k": 15, "max_depth": 10}, **own)
    for beta in BETAS:
        tree = {"beta": beta, "gate": "@gate.safetensors"}
        found[f"C2T {beta:g}"] = cell("c2t", 150, tree=tree, shipped=by("gate"), **own)
    for name, nodes, shape in (("1x1x1x1", 4, [1, 1, 1, 1]), ("4x2x2x1", 44, [4, 2, 2, 1])):
        found[name] = cell("mcsd", nodes, 0.7, rule="rrsw", tree={"shape": shape}, **own)
    lossy = {"shape": [4, 3, 1, 1], "init_width": 2, "allow_lossy": True}
    found["2+4x3x1x1"] = cell("mcsd", 82, 0.7, rule="rrsw", tree=lossy, **own)
    for t in (0.6, 1.0):
        for name, (children, rule) in RULES.items():
            tree = {"shape": "binary"} | ({"children": children} if children else {})
            found[f"{name} {t:g}"] = draws(scale.draws(DRAWS), "static_tree", 14, t, rule=rule, tree=tree, **own)
    return found


def section(r: Results, bundled: Sequence[Claim], scale: Scale) -> str:
    """Markdown: the lines, each with both pairs' verdicts."""
    theirs = {claim.text: claim for claim in bundled}
    rows = []
    for line in LINES:
        one = theirs[line.bundled]
        ours = _judged(r, line)
        rows.append((line.bundled.replace(", mean over depths", ""), _short(one), _short(ours)))
    return "\n\n".join([INTRO.format(scale=scale), table(("line", "bundled pair", "SmolLM2"), rows)])


def _judged(r: Results, line: Line) -> Claim:
    if line.a != "C2T":
        gain = difference(r[line.a], r[line.b])
        if line.bundled.startswith("alpha"):
            gain = Estimate(*(value / 4 for value in gain))
        return OURS.judge(line.bundled, gain)
    curves = [[r[f"{name} {size:g}"] for size in sizes] for name, sizes in (("C2T", BETAS), ("EAGLE-2", SIZES))]
    saved = nodes_saved(curves[:1], curves[1:], r[line.b])
    least = 0.2 if "20 %" in line.bundled else 0.0
    return OURS.judge(line.bundled, saved, least=least, shown=saved.percent())


def _short(claim: Claim) -> str:
    return f"{claim.figures.split(';')[0]} {claim.verdict}"


INTRO = """## On SmolLM2

SmolLM2-135M-Instruct with a [draft of three of its layers](training.md#a-draft-of-layers), {scale.prompts} prompts of
HumanEval and chat, {scale.tokens} tokens each; the binary trees of SpecHub's lines have 14 nodes.
`python -m benchmarks.papers --model smollm2 --draft DRAFT --humaneval FILE --chat FILE`."""
