"""DySpec (arXiv 2410.11744): its trees against others of equal size, and the correlation that they rest on."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.bootstrap import costed, difference, least_rise, ratio
from benchmarks.papers.decoding import Cell, measure
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import OURS, Claim, Source
from benchmarks.papers.models import files
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.proposers import Proposal

PAPER = "DySpec (arXiv 2410.11744)"
NODES, MANY = 64, 768
THEIRS = {  # tokens per step of DySpec, Sequoia, SpecInfer at T = 0, then at 0.6
    "64 nodes, LLaMA-2-7B, draft 68M, C4": (5.25, 4.99, 3.32, 3.71, 3.45, 3.44),
    "64 nodes, LLaMA-2-7B, draft 68M, CNN": (3.97, 4.04, 2.58, 3.18, 3.22, 3.06),
    "64 nodes, LLaMA-2-7B, draft 68M, GSM8K": (6.86, 4.92, 3.47, 4.31, 3.55, 3.03),
    "64 nodes, LLaMA-2-70B, draft 7B, C4": (9.10, 6.08, 4.67, 6.21, 5.72, 5.75),
    "768 nodes, LLaMA-2-70B, draft 7B, C4": (16.04, 9.40, 8.66, 7.14, 8.96, 6.93),
}
BEATS = 'abstract, "significantly outperforms strong competitors, including Specinfer and Sequoia"; '
SEQUOIA = {
    (NODES, 0.0): Source(BEATS + "Tables 1 to 3, T = 0", "4.99 -> 5.25 (C4), 4.04 -> 3.97 (CNN)", True),
    (NODES, 0.6): Source(BEATS + "Tables 1 to 3, T = 0.6", "3.45 -> 3.71 (C4), 3.22 -> 3.18 (CNN)", True),
    (MANY, 0.0): Source("Table 4, 768 nodes, T = 0", "9.40 -> 16.04 (70B, 7B, C4)", True),
    (MANY, 0.6): Source("Table 4, where Sequoia is ahead", "7.14 -> 8.96 (70B, 7B, C4)", True),
}
SPECINFER = {
    (NODES, 0.0): Source(BEATS + "Tables 1 to 3, T = 0", "3.32 -> 5.25 (C4)", True),
    (NODES, 0.6): Source(BEATS + "Tables 1 to 3, T = 0.6", "3.44 -> 3.71 (C4)", True),
    (MANY, 0.0): Source("Table 4, 768 nodes, T = 0", "8.66 -> 16.04 (70B, 7B, C4)"),
    (MANY, 0.6): Source("Table 4, 768 nodes, T = 0.6", "6.93 -> 7.14 (70B, 7B, C4)"),
}
CORRELATED = Source(
    'abstract, "the two variables are strongly correlated" (draft distribution and acceptance rate); Figure 2',
    "a curve",
    headline=True,
)
SPEED = Source('abstract, "improve the throughput up to 9.1" on LLaMA-2-70B', "9.1 (70B, 7B, T = 0)", headline=True)
MU = 0.0005
"""A draft forward over a target forward in the setting of the 9.1: the target's weights come from the CPU."""
FORKS = {NODES: [8] + [1] * 7, MANY: [24] + [1] * 31}
EXPANSION = [1, 1, 3, 1, 1, 1, 1, 1]
BINS = 5


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for t in (0.0, 0.6):
        own = scale.sampled if t else scale.greedy
        heap = {"mode": "heap"}
        found[f"DySpec {NODES} {t}"] = cell("dyspec", NODES, t, rule="rrsw", tree=heap, **own)
        static = {"rule": "rrsw", "tree": {"max_depth": 16}, **own}
        found[f"Sequoia {NODES} {t}"] = cell("sequoia", NODES, t, **static)
        fork = {"rule": "rrs", "tree": {"shape": FORKS[NODES], "children": "iid"}, **own}
        found[f"SpecInfer {NODES} {t}"] = cell("static_tree", NODES, t, **fork)
        for threshold in scale.some((0.03, 0.01), ()):
            tree = {"mode": "threshold", "threshold": threshold}
            found[f"threshold {threshold} {t}"] = cell("dyspec", 4 * NODES, t, rule="rrsw", tree=tree, **own)
        if not scale.quick:
            expansion = {"shape": EXPANSION, "children": "iid"}
            found[f"expansion {t}"] = cell("static_tree", NODES, t, rule="rrs", tree=expansion, **own)
            few = own | {"prompts": 16}
            large = {"max_children": 64, "max_depth": 32}
            found[f"DySpec {MANY} {t}"] = cell("dyspec", MANY, t, rule="rrsw", tree=heap | large, **few)
            found[f"Sequoia {MANY} {t}"] = cell("sequoia", MANY, t, rule="rrsw", tree={"max_depth": 32}, **few)
            fork = {"shape": FORKS[MANY], "children": "iid"}
            found[f"SpecInfer {MANY} {t}"] = cell("static_tree", MANY, t, rule="rrs", tree=fork, **few)
        found[f"probability {t}"] = Job("dyspec:by_probability", {"temperature": t, **scale.few})
    return found


def by_probability(_: Path, *, temperature: float, prompts: int, tokens: int) -> dict[str, Any]:
    """Acceptance rate of children of nodes that the walk visits, by the draft's probability (at temperature 0.6).

    The trees are OPT-Tree's, whose children are tested against the target's token, so that no sibling hides another.
    """
    counts, hits = torch.zeros(2, prompts, BINS, dtype=torch.int64)

    def look(proposal: Proposal, _: Tensor, result: Accepted, alive: Tensor) -> None:
        tree = proposal.tree
        visited = torch.zeros(len(alive), tree.tokens.shape[1] + 1)
        visited = visited.scatter(1, result.nodes + 1, 1.0).index_fill(1, torch.tensor([0]), 1.0) > 0
        path = torch.nn.functional.pad(tree.log_weight, (1, 0))
        own = (tree.log_weight - path.gather(1, tree.parent + 1)).exp()
        place = (own * BINS).long().clamp(max=BINS - 1)
        tested = tree.valid & visited.gather(1, tree.parent + 1)
        for found, chosen in ((counts, tested), (hits, tested & visited[:, 1:])):
            row, node = chosen.nonzero(as_tuple=True)
            found.index_put_((alive[row], place[row, node]), torch.ones_like(row), accumulate=True)

    tree = {"threshold": 0, "draft_temperature": 0.6}
    measure(Cell("opt_tree", 25, temperature, tree=tree, prompts=prompts, tokens=tokens), look=look)
    return {"counts": counts.tolist(), "hits": hits.tolist(), "file": files(prompts)}


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    parts = [
        f"Tokens per step with {NODES} and with {MANY} nodes (16 prompts). DySpec grows its heap tree with draft "
        "temperature 0.6 and verifies with RRSw, at T = 0 against the argmax; Sequoia's static tree for the bundled "
        "positional vector (measured at T = 0 and 1 together), RRSw; SpecInfer as eight i.i.d. chains of eight (24 of "
        "32) and as its expansion <1,1,3,1,1,1,1,1> (20 nodes), RRS."
    ]
    cells = [f"{name} {nodes}" for nodes in (NODES, MANY) for name in ("DySpec", "Sequoia", "SpecInfer")]
    names = [name for name in (*cells, "expansion") if f"{name} 0.0" in r]
    rows = [(n, *(ratio(r[f"{n} {t}"]) for t in (0.0, 0.6)), ratio(r[f"{n} 0.6"], "nodes").mean) for n in names]
    parts.append(table(("tree", "T = 0", "T = 0.6", "nodes per step"), rows))
    parts.append("The paper's, DySpec / Sequoia / SpecInfer; other models, so only the order compares:")
    theirs = [
        (k, " / ".join(f"{x:.2f}" for x in v[:3]), " / ".join(f"{x:.2f}" for x in v[3:])) for k, v in THEIRS.items()
    ]
    parts.append(table(("pair and text", "T = 0", "T = 0.6"), theirs))
    for nodes, t in SEQUOIA:
        if f"DySpec {nodes} {t}" not in r:
            continue
        three = [r[f"{name} {nodes} {t}"] for name in ("DySpec", "Sequoia", "SpecInfer")]
        where = f"{nodes} nodes, T = {t:g}"
        pair = ("Sequoia", "DySpec") if (nodes, t) == (MANY, 0.6) else ("DySpec", "Sequoia")
        gain = difference(*(three[:2] if pair[0] == "DySpec" else three[1::-1]))
        claims.append(
            SEQUOIA[nodes, t].judge(f"{pair[0]} > {pair[1]} ({where})", gain, WEAK if nodes == NODES else FEW)
        )
        claims.append(SPECINFER[nodes, t].judge(f"DySpec > SpecInfer ({where})", difference(three[0], three[2])))
        claims.append(OURS.judge(f"Sequoia > SpecInfer ({where})", difference(three[1], three[2])))
    speeds = {name: ratio(costed(r[f"{name} 0.0"], MU), "tokens", "cost") for name in names if "DySpec" in name}
    name, best = max(speeds.items(), key=lambda pair: pair[1].mean)
    text = f"a throughput of 9.1 times, modelled (T = 0, mu = {MU:g})"
    shown = f"{best} with {name.split()[1]} nodes"
    claims.append(SPEED.judge_fact(text, best.mean >= 9.1, shown, ACCEPTS, otherwise="not reached"))
    values = sorted({name.split()[1] for name in r if name.startswith("threshold ")}, reverse=True)
    if values:
        parts.append(f"Algorithm 2, with a threshold on the slot value and at most {4 * NODES} nodes:")
        rows = []
        for value in values:
            records = [r[f"threshold {value} {t}"] for t in (0.0, 0.6)]
            rows.append((value, *(x for one in records for x in (ratio(one), ratio(one, "nodes").mean))))
        parts.append(table(("threshold", "T = 0", "nodes per step", "T = 0.6", "nodes per step"), rows))
    parts.append(
        "Acceptance over the draft's probability at temperature 0.6: of the children of every node that the walk "
        "visits, in OPT-Tree's trees of 25 nodes."
    )
    rows = []
    for t in (0.0, 0.6):
        found = r[f"probability {t}"]
        hits, counts = (torch.tensor(found[name]).sum(0) for name in ("hits", "counts"))
        rows.append((f"{t:g}", *(f"{share:.3f}" for share in (hits / counts.clamp(min=1)).tolist())))
        rise = least_rise(found["hits"], found["counts"], found["file"])
        text = f"acceptance grows with the draft's probability, from each fifth to the next (T = {t:g})"
        claims.append(CORRELATED.judge(text, rise, shown=f"least step {rise.signed()}"))
    bins = (f"{number / BINS:g} to {(number + 1) / BINS:g}" for number in range(BINS))
    parts.append(table(("T", *bins), rows))
    return Section(PAPER, PAPER, parts, claims)


FEW = "16 prompts resolve no more"
ACCEPTS = "the draft accepts less here: at this mu the speed is nearly the tokens per step"
WEAK = (
    "a weak draft: the slot values trust its law, and Sequoia's vector is measured. The paper's weakest pair shows the "
    "same order on CNN (3.97 / 4.04 and 3.18 / 3.22)"
)
