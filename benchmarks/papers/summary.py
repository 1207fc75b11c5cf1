"""The two pages: the papers' headlines, and the tables with every line."""

import re
from collections.abc import Sequence
from textwrap import fill

from benchmarks.papers.judging import Claim
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

PAPERS = (
    "OPT-Tree (arXiv 2406.17276)",
    "DySpec (arXiv 2410.11744)",
    "C2T (arXiv 2502.13652)",
    "Target-initialised MCSD (arXiv 2409.10644)",
    "SpecHub (arXiv 2411.05289)",
)
WORDS = {
    "holds": "hold",
    "within noise": "are within noise",
    "does not hold": "do not hold",
    "not reached": "not reached",
}
NOTES = {
    "OPT-Tree (arXiv 2406.17276)": (
        "Figure 7 has tree operations at no more than 6.3 % of a step with 50 nodes. Ours take 1.1 to 2.3 % with at "
        "most 16, on a CPU: [tree, accept and commit](tuning.md#where-a-steps-time-goes)."
    ),
    "C2T (arXiv 2502.13652)": (
        "Trees and chains with the bundled gate, which reads log P where the paper's reads P; the lines of Table 1, "
        "the features, are of gates on P. N: nodes of EAGLE-2's tree. Sizes that the paper has not are judged in the "
        "tables. EAGLE-2 shaped by one draft temperature, 0.6, needs 21 to 23 % fewer nodes at the acceptance of "
        "N = 30, 60 and 100 without a classifier. A gate trained and read on that distribution saves 8 % [-2 %, 14 %] "
        "more, 4 % and 0 %: within noise, so none is bundled."
    ),
}
"""What must stand above a paper's lines."""
UNMEASURED = (
    ("all", "speed-ups on GPUs", "needs GPUs"),
    ("OPT-Tree", "Figure 6 above 100 nodes, Figure 9 between T = 0 and 1", "time"),
    ("OPT-Tree", "Figure 7", "needs a GPU; CPUs: `benchmarks/tree_work.py`"),
    ("DySpec", "Figure 8 and times of Table 5; Figure 5 at threshold 0.001", "needs a GPU; time"),
    ("C2T", "Table 2 at other sizes than N = 200", "time"),
    ("C2T", "the paper's gate, on P, in the lines of trees and chains", "time"),
    ("C2T", "latencies, transfer between models, Tables 5 and 6", "needs its models; time"),
    ("MCSD", "Figure 6: target-initialised sequences over the width", "time; the draft's own are in the tables"),
    ("MCSD", "MT-Bench scores, seconds", "log probabilities and modelled speeds instead"),
    ("SpecHub", "larger pairs, EAGLE heads", "needs such models"),
    ("SpecHub", "biSeq and ternary trees of other sizes and T", "time"),
)


def page(sections: Sequence[Section], scale: Scale) -> str:
    """docs/papers.md"""
    claims = [claim for section in sections for claim in section.claims]
    papers = [claim for claim in claims if claim.source]
    ours = [claim for claim in claims if not claim.source]
    intro = INTRO.format(scale=scale, papers=_counted(papers), ours=_counted(ours))
    parts = [fill(paragraph, 120, break_on_hyphens=False) for paragraph in intro.split("\n\n")]
    for paper in PAPERS:
        headlines = [claim for section in sections if section.paper == paper for claim in section.papers]
        kinds: dict[tuple[str, ...], list[Claim]] = {}
        for claim in headlines:
            if claim.headline:
                kinds.setdefault((claim.source, claim.theirs, _split(claim.text)[0]), []).append(claim)
        rows = [_row(claims) for claims in kinds.values()]
        heads = ("source", "the paper's", "line", "ours", "verdict")
        note = [fill(NOTES[paper], 120, break_on_hyphens=False)] if paper in NOTES else []
        parts += [f"## {paper}", *note, table(heads, rows)]
    return "\n\n".join(parts) + "\n"


def tables(sections: Sequence[Section]) -> str:
    """benchmarks/results/papers/tables.md"""
    missing = ("## Not measured", table(("paper", "what", "why"), UNMEASURED))
    return "\n\n".join([TABLES, *(section.markdown() for section in sections), *missing]) + "\n"


def _split(text: str) -> tuple[str, str]:
    """A line, and where it was measured: the last brackets."""
    found = re.fullmatch(r"(.*?) \(([^()]*)\)", text)
    return (found[1], found[2]) if found else (text, "")


def _row(claims: list[Claim]) -> tuple[str, str, str, str, str]:
    """Lines that differ in where they were measured only are one row."""
    first, verdicts = claims[0], [claim.verdict for claim in claims]
    figures = [re.sub("; resolves [^;]*", "", claim.figures) for claim in claims]  # half the interval: in the tables
    places = [_split(claim.text)[1] for claim in claims]
    shown = [f"{where}: {figure}" if where else figure for where, figure in zip(places, figures, strict=True)]
    counted = [f"{word} ({verdicts.count(word)} of {len(verdicts)})" for word in WORDS if word in verdicts]
    verdict = verdicts[0] if len(set(verdicts)) == 1 else ", ".join(counted)
    reasons = [claim.reason for claim in claims if claim.verdict in ("does not hold", "not reached") and claim.reason]
    verdict = f"{verdict}: {reasons[0]}" if reasons else verdict
    source = re.sub(r', "[^"]*"', "", first.source)  # the quotation is in the tables
    return source, first.theirs, _split(first.text)[0], "<br>".join(shown), verdict


def _counted(claims: Sequence[Claim]) -> str:
    """As "3 lines, 2 hold, 1 not reached"."""
    counts = ", ".join(
        f"{count} {word}" for verdict, word in WORDS.items() if (count := sum(c.verdict == verdict for c in claims))
    )
    return f"{len(claims)} lines, {counts or 'none judged'}"


INTRO = """# The papers' claims on the bundled pair

What five papers claim, and whether it holds here. `python -m benchmarks.papers` measures it (some 90 minutes on one
core); `--render` writes this page and [the tables](../benchmarks/results/papers/tables.md), which have every line and
what was not measured.

The headlines are judged [on a real model](#on-smollm2) as well.

The bundled pair, float32, {scale.prompts} prompts of 15 held-out files, {scale.tokens} tokens each. The papers' models
differ, so compare orders and ratios, not absolute figures. A "modelled" speed is tokens / (1 + mu * draft forwards),
not a time. Settings: [examples/papers](../examples/papers/README.md).

A line "A > B" *holds* when the 95 % bootstrap interval of the difference (over files) lies above 0, *does not hold*
when it lies below, and is *within noise* otherwise. A *limit* replaces 0. "The same" holds when the whole interval
lies within the *margin*. Lines without an interval compare the figures themselves. *Not reached*: no measured tree
accepts that much.

The papers' claims: {papers}. Our own lines are in the tables and not counted among these: {ours}."""
TABLES = """# The papers' claims: tables and lines

Generated by `python -m benchmarks.papers`; [papers.md](../../../docs/papers.md) is the summary and says how lines are
judged. ± is half the 95 % bootstrap interval over files; "resolves" is the half-width of a line's interval, the
difference detected with 50 % power. Intervals are not corrected for the number of lines. Tokens per step include the
bonus token; nodes per step do not count the root. The package's proposers, rules and RNG run in batches over a plain
PyTorch Llama."""
