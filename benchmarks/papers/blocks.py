"""DySpec's order of nodes: how many blocks of the tree mask are empty (arXiv 2410.11744, appendix C)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers import dyspec
from benchmarks.papers.decoding import Cell, measure
from benchmarks.papers.jobs import Job, Results, Work
from benchmarks.papers.judging import Source
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table
from vllm_adaptive_tree.trees.orders import depth_first, heavy_path, mask_blocks

BLOCKS = {256: (36, 22.5), 512: (135.5, 52.8), 1024: (490.2, 119.3), 2048: (1654.5, 278.7)}  # original, reordered
DRAFTED = {768: (366.12, 218.31), 1024: (580.07, 295.59)}


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for nodes in scale.some(tuple(BLOCKS), (256,)):
        found[f"random {nodes}"] = Job("blocks:random_blocks", {"nodes": nodes, "trees": 8 if scale.quick else 32})
    for nodes in scale.some(tuple(DRAFTED), (128,)):
        found[f"drafted {nodes}"] = Job("blocks:drafted_blocks", {"nodes": nodes, "prompts": 4 if scale.quick else 16})
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
    rows, claims = [], []
    for kind, theirs in (("random", BLOCKS), ("drafted", DRAFTED)):
        for nodes in sorted(int(name.split()[1]) for name in r if name.startswith(kind)):
            found = {order: sum(counts) / len(counts) for order, counts in r[f"{kind} {nodes}"].items()}
            paper = theirs.get(nodes, (None, None))
            rows.append((f"{kind} tree, {nodes} nodes", *found.values(), *paper))
            shown = f"{found['original']:.1f} -> {found['depth first']:.1f} / {found['heavy path']:.1f}"
            where = "Table 5" if kind == "random" else "Figure 9"
            source = Source(where, " -> ".join(map(str, paper)), headline=kind == "random" and nodes == 1024)
            fewer = max(found["depth first"], found["heavy path"]) < found["original"]
            claims.append(source.judge_fact(f"reordering empties blocks ({kind}, {nodes} nodes)", fewer, shown))
            if kind == "random" and nodes in theirs:
                ours = (found["original"], found["depth first"])
                close = all(abs(a / b - 1) < 0.1 for a, b in zip(ours, theirs[nodes], strict=True))
                text = f"block counts within a tenth of the paper's ({nodes} nodes)"
                claims.append(source._replace(headline=False).judge_fact(text, close, shown, SPREAD))
    heads = ("tree", "original", "depth first", "heavy path", "paper: original", "paper: reordered")
    parts = [
        "Table 5 and Figure 9 of the paper: how many 32 x 32 blocks of the tree mask are not empty, in the order in "
        "which nodes are revealed, depth first, and along heavy paths (mean over trees). Random trees: every parent "
        "uniform among the earlier nodes, the first of which is the root. The paper prints one reordered figure. Its "
        "drafted trees (Figure 9) are other ones, and their counts may include the prompt's blocks, so they are shown "
        "and not compared.",
        table(heads, rows),
    ]
    return Section(dyspec.PAPER, "DySpec: blocks of the tree mask", parts, claims)


SPREAD = "the paper prints one random tree's count or a mean of unknown size; ours are means over 32 trees"
