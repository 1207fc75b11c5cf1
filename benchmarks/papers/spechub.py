"""SpecHub (Sun et al., arXiv 2411.05289)."""

from pathlib import Path

from benchmarks.papers.jobs import Job, Results, cell
from benchmarks.papers.judging import Estimate, bootstrap_mean, judge, judge_fact, pooled, ratio
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

RULES = {  # name -> (children, rule)
    "RRS": ("iid", "rrs"),
    "RRSw": ("without_replacement", "rrsw"),
    "SpecHub": (None, "spechub"),
    "traversal": ("without_replacement", "traversal"),
}
DEPTHS = {2: 2, 3: 6, 4: 14, 5: 30}  # the paper's 2^d counts the root: d - 1 drafted levels -> nodes
THEIRS = {  # JF68M -> LLaMA-2-7B, CNN: tokens per step of RRS, RRSw, SpecHub
    (0.6, 2): (1.554, 1.600, 1.616),
    (0.6, 3): (1.848, 1.969, 1.986),
    (0.6, 4): (2.051, 2.169, 2.246),
    (0.6, 5): (2.139, 2.315, 2.403),
    (1.0, 2): (1.543, 1.552, 1.600),
    (1.0, 3): (1.838, 1.879, 1.983),
    (1.0, 4): (1.976, 2.044, 2.211),
    (1.0, 5): (2.069, 2.138, 2.310),
}
SECOND = {0.3: (0.043, 0.111, 0.118), 0.6: (0.074, 0.109, 0.138), 1.0: (0.102, 0.114, 0.166)}
TOY = {  # (T, lambda) -> RRS, RRSw, OTM, OTMw, SpecHub
    (0.1, 0.7): (0.627, 0.712, 0.638, 0.735, 0.740),
    (0.1, 0.5): (0.332, 0.406, 0.335, 0.413, 0.412),
    (0.25, 0.7): (0.735, 0.765, 0.785, 0.832, 0.811),
    (0.25, 0.5): (0.456, 0.498, 0.474, 0.525, 0.497),
    (0.5, 0.7): (0.809, 0.812, 0.904, 0.915, 0.850),
    (0.5, 0.5): (0.646, 0.659, 0.705, 0.721, 0.640),
}


def jobs(scale: Scale) -> dict[str, Job]:
    found = {"toy": Job("exact:toy_table", {"pairs": 100 if scale.quick else 2000})}
    for t in scale.some((0.3, 0.6, 1.0), (0.6,)):
        every = {"prompts_": 8, "tokens": 16, "every": 4} if scale.quick else {"prompts_": 64, "tokens": 64, "every": 4}
        found[f"node {t}"] = Job("exact:nodes_of_pair", {"temperature": t, **every})
        for depth in scale.some(tuple(DEPTHS), (2, 3)):
            for name, (children, rule) in RULES.items():
                tree = {"shape": "binary"} | ({"children": children} if children else {})
                own = scale.sampled | ({"prompts": min(24, scale.prompts)} if rule == "traversal" else {})
                found[f"{name} {depth} {t}"] = cell("static_tree", DEPTHS[depth], t, rule=rule, tree=tree, **own)
    return found


def section(r: Results, figures: Path) -> Section:
    temperatures = sorted({float(name.split()[1]) for name in r if name.startswith("node ")})
    depths = sorted({int(name.split()[1]) for name in r if name.startswith("RRS ")})
    names = list(RULES)
    claims = []
    parts = [
        "Tokens per step on full binary trees. Depth counts the root's level, as in the paper: 2, 6, 14 and 30 "
        "nodes. Draft and target at the same temperature. Traversal verification, on the same trees as RRSw, is "
        "slow to simulate and decodes the first 24 prompts only."
    ]
    rows = []
    for t in temperatures:
        for depth in depths:
            theirs = THEIRS.get((t, depth))
            shown = " / ".join(f"{x:.3f}" for x in theirs) if theirs else None
            rows.append((f"{t:g}", depth, *(ratio(r[f"{name} {depth} {t}"]) for name in names), shown))
    parts.append(table(("T", "depth", *names, "paper: RRS / RRSw / SpecHub (68M -> LLaMA-2-7B, CNN)"), rows))
    for t in temperatures:
        for a, b in (("RRSw", "RRS"), ("SpecHub", "RRSw"), ("traversal", "RRSw")):
            gain = pooled([(r[f"{a} {depth} {t}"], r[f"{b} {depth} {t}"]) for depth in depths])
            text = f"{a} >= {b} in tokens per step (T = {t:g}, mean over depths)"
            claims.append(judge(text, gain, REASONS[a]))

    parts.append(
        "The children of the root: how often the first and the second draft is the accepted one, counted in the "
        "trees above (all depths together), and exactly, by closed forms over the two laws at the same places of "
        "the target's own text in every row. Measured shares carry the noise of drawing, and steps "
        "begin behind rejections more often than text does, where drafts are worse; the exact ones carry neither."
    )
    rows = []
    for t in temperatures:
        exact = r[f"node {t}"]
        for place, name in enumerate(("RRS", "RRSw", "SpecHub")):
            cells = [r[f"{name} {depth} {t}"] for depth in depths]
            counted = {
                w: sum(sum(one[w]) for one in cells) / sum(sum(one["steps"]) for one in cells)
                for w in ("first", "second")
            }
            values = {w: bootstrap_mean(exact[f"{name} {w}"]) for w in ("first", "second")}
            paper = SECOND[t][place] if t in SECOND else None
            row = (f"{counted[w]:.3f}" for w in counted)
            shown = (_three(values[w]) for w in values)
            rows.append((f"{t:g}", name, *row, *shown, None if paper is None else f"{paper:.3f}"))
        for a, b in (("RRSw", "RRS"), ("SpecHub", "RRSw")):
            gain = bootstrap_mean([x - y for x, y in zip(exact[f"{a} second"], exact[f"{b} second"], strict=True)])
            claims.append(judge(f"{a} >= {b} in second-draft acceptance, exact (T = {t:g})", gain, REASONS["second"]))
            both = [[x + y for x, y in zip(exact[f"{n} first"], exact[f"{n} second"], strict=True)] for n in (a, b)]
            gain = bootstrap_mean([x - y for x, y in zip(*both, strict=True)])
            claims.append(judge(f"{a} >= {b} in acceptance of the pair, exact (T = {t:g})", gain, REASONS["both"]))
    heads = ("T", "rule", "first, counted", "second, counted", "first, exact", "second, exact", "paper: second (68M)")
    parts.append(table(heads, rows))

    parts.append(
        "Appendix D's toy: vocabulary 50, two drafts, p = softmax(u_p / T), q = softmax((lambda u_p + (1 - lambda) "
        "u_q) / T) with standard normal u (the paper says uniform, which does not give its figures); exact "
        "acceptance, ours / paper's. OTM: the optimum for two drafts with replacement, OTMw without."
    )
    rows = []
    order = ("RRS", "RRSw", "OTM", "OTMw", "SpecHub")
    off = 0.0
    for one in r["toy"]:
        setting = (one["T"], one["lambda"])
        means = {name: one[name] for name in order}
        off = max(off, *(abs(means[name] - x) for name, x in zip(order, TOY[setting], strict=True)))
        rows.append((*setting, *(f"{means[n]:.3f} / {x:.3f}" for n, x in zip(order, TOY[setting], strict=True))))
    parts.append(table(("T", "lambda", *order), rows))
    by = {(one["T"], one["lambda"]): {n: one[n] for n in order} for one in r["toy"]}
    where = [s for s, m in by.items() if m["SpecHub"] <= m["RRSw"]]
    claims.append(
        judge_fact(
            "toy: SpecHub > RRSw but at lambda = 0.5 and T >= 0.25",
            all(s in ((0.25, 0.5), (0.5, 0.5)) for s in where),
            f"not above at {', '.join(f'T = {t:g}, lambda = {share:g}' for t, share in where) or 'none'}",
        )
    )
    optima = all(m["OTM"] >= m["RRS"] and m["OTMw"] >= m["RRSw"] and m["OTMw"] >= m["OTM"] for m in by.values())
    claims.append(
        judge_fact("toy: OTM >= RRS, OTMw >= RRSw, OTMw >= OTM", optima, "in all six settings" if optima else "not")
    )
    claims.append(
        judge_fact("toy: within 0.05 of the paper's table", off < 0.05, f"largest distance {off:.3f}", REASONS["toy"])
    )
    return Section("SpecHub (arXiv 2411.05289)", parts, claims)


def _three(x: Estimate) -> str:
    return f"{x.mean:.3f} ± {(x.high - x.low) / 2:.3f}"


REASONS = {
    "RRSw": "the exact acceptance of a pair is higher (below), by less than these draws resolve",
    "SpecHub": "the exact acceptance of a pair is higher (below), by less than these draws resolve",
    "traversal": "on small models, enumerated, traversal gains about 1 %; 24 prompts do not resolve that",
    "second": "see the exact shares",
    "both": "see the exact shares",
    "toy": "the paper averages 100 pairs of laws, which alone leaves some hundredths at T = 0.1",
}
