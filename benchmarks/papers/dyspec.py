"""DySpec (arXiv 2410.11744)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.decoding import Cell, measure
from benchmarks.papers.jobs import Job, Results, cell
from benchmarks.papers.judging import difference, judge, judge_fact, ratio
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table
from vllm_adaptive_tree.trees.orders import depth_first, heavy_path, mask_blocks

NODES = 64
THEIRS = {  # tokens per step of DySpec, Sequoia, SpecInfer at T = 0, then at 0.6
    "LLaMA-2-7B, draft 68M, C4": (5.25, 4.99, 3.32, 3.71, 3.45, 3.44),
    "LLaMA-2-7B, draft 68M, CNN": (3.97, 4.04, 2.58, 3.18, 3.22, 3.06),
    "LLaMA-2-7B, draft 68M, GSM8K": (6.86, 4.92, 3.47, 4.31, 3.55, 3.03),
    "LLaMA-2-70B, draft 7B, C4": (9.10, 6.08, 4.67, 6.21, 5.72, 5.75),
}
BLOCKS = {256: (36, 22.5), 512: (135.5, 52.8), 1024: (490.2, 119.3), 2048: (1654.5, 278.7)}  # original, reordered
DRAFTED = {768: (366.12, 218.31), 1024: (580.07, 295.59)}
FORK, EXPANSION = [8, 1, 1, 1, 1, 1, 1, 1], [1, 1, 3, 1, 1, 1, 1, 1]


def jobs(scale: Scale) -> dict[str, Job]:
    found = {}
    for t in (0.0, 0.6):
        own = scale.sampled if t else scale.greedy
        found[f"DySpec {t}"] = cell("dyspec", NODES, t, rule="rrsw", tree={"mode": "heap"}, **own)
        found[f"Sequoia {t}"] = cell("sequoia", NODES, t, rule="rrsw", tree={"max_depth": 16}, **own)
        for name, shape in scale.some((("fork", FORK), ("expansion", EXPANSION)), (("fork", FORK),)):
            found[f"SpecInfer {name} {t}"] = cell(
                "static_tree", NODES, t, rule="rrs", tree={"shape": shape, "children": "iid"}, **own
            )
        for threshold in scale.some((0.03, 0.01), (0.03,)):
            tree = {"mode": "threshold", "threshold": threshold}
            found[f"threshold {threshold} {t}"] = cell("dyspec", 4 * NODES, t, rule="rrsw", tree=tree, **own)
    for nodes in scale.some(tuple(BLOCKS), (256,)):
        found[f"random {nodes}"] = Job("dyspec:random_blocks", {"nodes": nodes, "trees": 8 if scale.quick else 32})
    for nodes in scale.some(tuple(DRAFTED), (128,)):
        found[f"drafted {nodes}"] = Job("dyspec:drafted_blocks", {"nodes": nodes, "prompts": 4 if scale.quick else 16})
    return found


def random_blocks(_: Path, *, nodes: int, trees: int) -> dict[str, list[int]]:
    """Blocks of the masks of random recursive trees: every parent uniform among the earlier nodes; node 0 the root."""
    uniform = torch.rand(trees, nodes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parent = (uniform * torch.arange(nodes)).long()
    parent[:, 0] = -1
    return _blocks(parent, torch.ones_like(parent, dtype=torch.bool))


def drafted_blocks(_: Path, *, nodes: int, prompts: int) -> dict[str, list[int]]:
    """Blocks of the masks of DySpec's trees of the first step behind each prompt."""
    trees: list[Any] = []
    cell = Cell("dyspec", nodes, 0.6, "rrsw", {"mode": "heap"}, prompts=prompts, tokens=3)
    measure(cell, look=lambda proposal, *_: trees.append(proposal.tree))
    return _blocks(trees[0].parent, trees[0].valid)


def _blocks(parent: Tensor, valid: Tensor) -> dict[str, list[int]]:
    orders = {
        "original": torch.arange(parent.shape[1]).expand_as(parent),
        "depth first": depth_first(parent, valid),
        "heavy path": heavy_path(parent, valid),
    }
    return {name: mask_blocks(parent, order, valid).tolist() for name, order in orders.items()}


def section(r: Results, figures: Path) -> Section:
    claims = []
    parts = [
        f"Tokens per step with {NODES} nodes. DySpec grows its heap tree with draft temperature 0.6 and verifies "
        "with RRSw, at T = 0 against the argmax; Sequoia's static tree for the bundled positional vector (measured "
        "at T = 0 and 1 together), RRSw; SpecInfer as eight i.i.d. chains of eight and as its expansion "
        "<1,1,3,1,1,1,1,1> (20 nodes), RRS."
    ]
    names = [n for n in ("DySpec", "Sequoia", "SpecInfer fork", "SpecInfer expansion") if f"{n} 0.0" in r]
    rows = [(n, *(ratio(r[f"{n} {t}"]) for t in (0.0, 0.6)), ratio(r[f"{n} 0.6"], "nodes").mean) for n in names]
    parts.append(table(("tree", "T = 0", "T = 0.6", "nodes per step"), rows))
    parts.append("The paper's, 64 nodes, DySpec / Sequoia / SpecInfer; other models, so only the order compares:")
    theirs = [
        (k, " / ".join(f"{x:.2f}" for x in v[:3]), " / ".join(f"{x:.2f}" for x in v[3:])) for k, v in THEIRS.items()
    ]
    parts.append(table(("pair and text", "T = 0", "T = 0.6"), theirs))
    for t in (0.0, 0.6):
        for a, b in zip(("DySpec", "Sequoia"), ("Sequoia", "SpecInfer fork"), strict=True):
            gain = difference(r[f"{a} {t}"], r[f"{b} {t}"])
            claims.append(judge(f"{a} > {b.split()[0]} (T = {t:g})", gain, REASONS.get(a, "")))
    values = sorted({name.split()[1] for name in r if name.startswith("threshold ")}, reverse=True)
    parts.append(f"Algorithm 2, with a threshold on the slot value and at most {4 * NODES} nodes:")
    rows = []
    for value in values:
        records = [r[f"threshold {value} {t}"] for t in (0.0, 0.6)]
        rows.append((value, *(x for one in records for x in (ratio(one), ratio(one, "nodes").mean))))
    parts.append(table(("threshold", "T = 0", "nodes per step", "T = 0.6", "nodes per step"), rows))

    parts.append(
        "Table 5 of the paper: how many 32 x 32 blocks of the tree mask are not empty, in the order in which nodes are "
        "revealed, depth first, and along heavy paths (mean over trees). Random trees: every parent uniform among the "
        "earlier nodes, the first of which is the root. The paper prints one reordered figure."
    )
    rows = []
    for kind, paper in (("random", BLOCKS), ("drafted", DRAFTED)):
        for nodes in sorted(int(name.split()[1]) for name in r if name.startswith(kind)):
            found = {order: sum(counts) / len(counts) for order, counts in r[f"{kind} {nodes}"].items()}
            theirs_ = paper.get(nodes, (None, None))
            rows.append((f"{kind} tree, {nodes} nodes", *found.values(), *theirs_))
            fewer = max(found["depth first"], found["heavy path"]) < found["original"]
            figures_ = f"{found['original']:.1f} -> {found['depth first']:.1f} / {found['heavy path']:.1f}"
            claims.append(judge_fact(f"reordering empties blocks ({kind}, {nodes} nodes)", fewer, figures_))
            if kind == "random" and nodes in paper:
                close = all(
                    abs(ours / theirs - 1) < 0.1
                    for ours, theirs in zip((found["original"], found["depth first"]), paper[nodes], strict=True)
                )
                text = f"block counts of Table 5 within a tenth ({nodes} nodes)"
                claims.append(judge_fact(text, close, figures_, REASONS["blocks"]))
    heads = ("tree", "original", "depth first", "heavy path", "paper: original", "paper: reordered")
    parts.append(table(heads, rows))
    return Section("DySpec (arXiv 2410.11744)", parts, claims)


REASONS = {
    "DySpec": (
        "a weak draft: the slot values trust its law, and Sequoia's vector is measured. The paper's weakest pair shows "
        "the same order on CNN (3.97 / 4.04 and 3.18 / 3.22)"
    ),
    "blocks": "the paper prints one random tree's count or a mean of unknown size; ours are means over 32 trees",
}
