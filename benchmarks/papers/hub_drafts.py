"""SpecHub: how often each draft at a node is the accepted one, counted and exactly (arXiv 2411.05289)."""

from pathlib import Path

import numpy as np

from benchmarks.papers import spechub
from benchmarks.papers.bootstrap import Estimate, difference, mean
from benchmarks.papers.jobs import Job, Results, Work, cell
from benchmarks.papers.judging import OURS, Claim, Source
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

SECOND = {0.3: (0.043, 0.111, 0.118), 0.6: (0.074, 0.109, 0.138), 1.0: (0.102, 0.114, 0.166)}
TOY = {  # (T, lambda) -> RRS, RRSw, OTM, OTMw, SpecHub
    (0.1, 0.7): (0.627, 0.712, 0.638, 0.735, 0.740),
    (0.1, 0.5): (0.332, 0.406, 0.335, 0.413, 0.412),
    (0.25, 0.7): (0.735, 0.765, 0.785, 0.832, 0.811),
    (0.25, 0.5): (0.456, 0.498, 0.474, 0.525, 0.497),
    (0.5, 0.7): (0.809, 0.812, 0.904, 0.915, 0.850),
    (0.5, 0.5): (0.646, 0.659, 0.705, 0.721, 0.640),
}
ORDER = ("RRS", "RRSw", "OTM", "OTMw", "SpecHub")
SECONDS = Source(
    "table of second-draft acceptance",
    "0.111 -> 0.118 (T = 0.3), 0.109 -> 0.138 (T = 0.6), 0.114 -> 0.166 (T = 1)",
    headline=True,
)
DRAFTS = 10
DECAY = Source("appendix C.1, Figure 9", "a curve", headline=True)
APPENDIX = Source("appendix D, the toy table", "its figures are in the table", headline=False)


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {"toy": Job("exact:toy_table", {"pairs": 100 if scale.quick else 2000})}
    every = {"prompts_": 8, "tokens": 16, "every": 4} if scale.quick else {"prompts_": 64, "tokens": 64, "every": 4}
    for t in scale.some((0.3, 0.6, 1.0), (0.6,)):
        found[f"node {t}"] = Job("exact:nodes_of_pair", {"temperature": t, **every})
    for t in scale.some((spechub.HOT,), ()):
        for name in ("RRS", "RRSw"):
            children, rule = spechub.RULES[name]
            tree = {"shape": [DRAFTS], "children": children}
            found[f"ten {name} {t:g}"] = cell("static_tree", DRAFTS, t, rule=rule, tree=tree, **scale.few)
    trees = spechub.jobs(scale)
    return found | {name: trees[name] for name in trees if name.split()[0] in spechub.THREE}


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    parts = _shares(r, claims) + _ten(r, claims) + _toy(r, claims)
    return Section(spechub.PAPER, "SpecHub: the drafts of a node", parts, claims)


def _shares(r: Results, claims: list[Claim]) -> list[str]:
    rows = []
    for t in sorted(float(name.split()[1]) for name in r if name.startswith("node ")):
        exact = r[f"node {t}"]
        for place, name in enumerate(spechub.THREE):
            cells = [r[key] for key in r if key.startswith(f"{name} ") and key.endswith(f" {t:g}")]
            steps = sum(sum(one["steps"]) for one in cells)
            counted = [f"{sum(sum(one[w]) for one in cells) / steps:.3f}" for w in ("first", "second")]
            shares = [_three(mean(exact[f"{name} {w}"], exact["file"])) for w in ("first", "second")]
            rows.append((f"{t:g}", name, *counted, *shares, f"{SECOND[t][place]:.3f}"))
        second = {name: np.array(exact[f"{name} second"]) for name in spechub.THREE}
        pair = {name: np.array(exact[f"{name} first"]) + second[name] for name in spechub.THREE}
        for a, b, source, of, what in (
            ("SpecHub", "RRSw", SECONDS, second, "second-draft acceptance, exact"),
            ("SpecHub", "RRSw", OURS, pair, "acceptance of the pair, exact"),
            ("RRSw", "RRS", OURS, second, "second-draft acceptance, exact; by construction never less"),
        ):
            gain = mean((of[a] - of[b]).tolist(), exact["file"])
            claims.append(source.judge(f"{a} > {b} in {what} (T = {t:g})", gain))
    heads = ("T", "rule", "first, counted", "second, counted", "first, exact", "second, exact", "paper: second (68M)")
    return [
        "The children of the root: how often the first and the second draft is the accepted one, counted in the "
        "binary trees above (all depths together), and exactly, by closed forms over the two laws at the same "
        "places of the target's own text in every row. Measured shares carry the noise of drawing, and steps begin "
        "behind rejections more often than text does, where drafts are worse; the exact ones carry neither.",
        table(heads, rows),
    ]


def _ten(r: Results, claims: list[Claim]) -> list[str]:
    rows = []
    for t in (f"{spechub.HOT:g}",):
        for name in ("RRS", "RRSw"):
            if (one := r.get(f"ten {name} {t}")) is not None:
                steps = sum(one["steps"])
                rows.append((t, name, *(f"{count / steps:.3f}" for count in one["ranks"][:DRAFTS])))
        if f"ten RRSw {t}" in r:
            later = [_later(r[f"ten {name} {t}"]) for name in ("RRSw", "RRS")]
            claims.append(
                DECAY.judge(f"drafts 2 to 10: RRSw accepts more than RRS (T = {t})", difference(*later, "later"))
            )
    if not rows:
        return []
    heads = ("T", "rule", *(f"draft {number}" for number in range(1, DRAFTS + 1)))
    return ["Ten drafts at one node (32 prompts): how often each is the accepted one.", table(heads, rows)]


def _later(record: dict[str, list[float]]) -> dict[str, list[float]]:
    """With `later`: steps in which a draft but the first was accepted, in trees of one level."""
    accepted = [tokens - steps for tokens, steps in zip(record["tokens"], record["steps"], strict=True)]
    return record | {"later": [a - first for a, first in zip(accepted, record["first"], strict=True)]}


def _toy(r: Results, claims: list[Claim]) -> list[str]:
    rows, off = [], 0.0
    for one in r["toy"]:
        theirs = TOY[one["T"], one["lambda"]]
        off = max(off, *(abs(one[name] - x) for name, x in zip(ORDER, theirs, strict=True)))
        shown = (f"{one[name]:.3f} / {x:.3f}" for name, x in zip(ORDER, theirs, strict=True))
        rows.append((one["T"], one["lambda"], *shown))
    by = {(one["T"], one["lambda"]): {name: one[name] for name in ORDER} for one in r["toy"]}
    where = [s for s, m in by.items() if m["SpecHub"] <= m["RRSw"]]
    shown_ = f"not above at {', '.join(f'T = {t:g}, lambda = {share:g}' for t, share in where) or 'none'}"
    text = "toy: SpecHub > RRSw but at lambda = 0.5 and T >= 0.25"
    claims.append(APPENDIX.judge_fact(text, all(s in ((0.25, 0.5), (0.5, 0.5)) for s in where), shown_))
    optima = all(m["OTM"] >= m["RRS"] and m["OTMw"] >= m["RRSw"] and m["OTMw"] >= m["OTM"] for m in by.values())
    shown_ = "in all six settings" if optima else "not in all six settings"
    claims.append(OURS.judge_fact("toy: OTM >= RRS, OTMw >= RRSw, OTMw >= OTM", optima, shown_))
    text = "toy: within 0.05 of the paper's table"
    claims.append(APPENDIX.judge_fact(text, off < 0.05, f"largest distance {off:.3f}", PAIRS))
    return [
        "Appendix D's toy: vocabulary 50, two drafts, p = softmax(u_p / T), q = softmax((lambda u_p + (1 - lambda) "
        "u_q) / T) with standard normal u (the paper says uniform, which does not give its figures); exact "
        "acceptance, ours / paper's. OTM: the optimum for two drafts with replacement, OTMw without.",
        table(("T", "lambda", *ORDER), rows),
    ]


def _three(x: Estimate) -> str:
    return f"{x.mean:.3f} ± {x.resolution:.3f}"


PAIRS = "the paper averages 100 pairs of laws, which alone leaves some hundredths at T = 0.1"
