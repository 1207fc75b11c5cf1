"""The two pages: the papers' headlines on one, every line and table in its appendix."""

import re
from collections.abc import Sequence
from textwrap import fill

from benchmarks.papers.judging import Claim
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

SETTINGS = {  # paper -> its settings in examples/papers
    "OPT-Tree (arXiv 2406.17276)": ("opt_tree",),
    "DySpec (arXiv 2410.11744)": ("dyspec", "dyspec-threshold"),
    "C2T (arXiv 2502.13652)": ("c2t",),
    "Target-initialised MCSD (arXiv 2409.10644)": ("mcsd", "mcsd-lossless"),
    "SpecHub (arXiv 2411.05289)": ("spechub",),
}
WORDS = {
    "holds": "hold",
    "within noise": "are within noise",
    "does not hold": "do not hold",
    "not reached": "not reached",
}
UNMEASURED = (
    ("all", "speed-ups in seconds on GPUs", "needs GPUs; seconds on CPUs are in [benchmarks](benchmarks.md)"),
    ("all", "other pairs and texts", "one pair and one kind of text are bundled; no models are downloaded"),
    ("all", "more draws and prompts, until all noise is decided", "hours of one core; lines say what they resolve"),
    ("OPT-Tree", "Figure 6 above 100 nodes, Figure 9's other temperatures", "time; T = 0 and 1 are measured"),
    (
        "OPT-Tree",
        "Figure 7, tree operations at most 6.3 % of a step",
        "a GPU's share; `benchmarks/tree_work.py` has ours",
    ),
    ("DySpec", "Figure 8 and the times of Table 5: kernels that skip blocks", "needs a GPU"),
    ("DySpec", "Figure 5 at threshold 0.001 (552 of 768 nodes)", "time; thresholds 0.03 and 0.01 are in the appendix"),
    ("C2T", "18 % less time on 70B, latencies of the stages", "needs its models and GPUs"),
    ("C2T", "transfer between data sets and models, fine-tuning", "needs several of each"),
    (
        "C2T",
        "Tables 5 and 6: survivors a level, entropies of fewer tokens",
        "time; `top_k` and `entropy_top` are options",
    ),
    ("C2T", "Figures 1 and 2, appendix D: heat maps of acceptance", "pictures of its models, no claim about others"),
    ("C2T", "DyMax, which stops at a token's own probability", "no method here has that rule"),
    ("MCSD", "MT-Bench scores", "the target is too small for them; log probabilities instead"),
    ("MCSD", "speed of decision models in seconds", "modelled with mu = 0.1"),
    ("SpecHub", "the 160M draft, 13B and 33B targets, EAGLE heads", "needs such models"),
    ("SpecHub", "biSeq and ternary trees of other sizes and T", "time; the largest are measured, at T = 1"),
)


def page(sections: Sequence[Section], scale: Scale) -> str:
    """docs/papers.md"""
    claims = [claim for section in sections for claim in section.claims]
    papers = [claim for claim in claims if claim.source]
    ours = [claim for claim in claims if not claim.source]
    intro = INTRO.format(scale=scale, papers=_counted(papers), ours=_counted(ours))
    parts = [fill(paragraph, 120, break_on_hyphens=False) for paragraph in intro.split("\n\n")]
    for paper, files in SETTINGS.items():
        headlines = [claim for section in sections if section.paper == paper for claim in section.papers]
        links = " and ".join(f"[`{file}.json`](../examples/papers/{file}.json)" for file in files)
        kinds: dict[tuple[str, ...], list[Claim]] = {}
        for claim in headlines:
            if claim.headline:
                kinds.setdefault((claim.source, claim.theirs, _split(claim.text)[0]), []).append(claim)
        rows = [_row(claims) for claims in kinds.values()]
        heads = ("where the paper says it", "the paper's", "line", "ours", "verdict")
        parts += [f"## {paper}", f"Its settings: {links}.", table(heads, rows)]
    parts += ["## Not measured", table(("paper", "what", "why"), UNMEASURED)]
    return "\n\n".join(parts) + "\n"


def appendix(sections: Sequence[Section], scale: Scale) -> str:
    """docs/papers-appendix.md"""
    return "\n\n".join([APPENDIX.format(scale=scale), *(section.markdown() for section in sections)]) + "\n"


def _split(text: str) -> tuple[str, str]:
    """A line, and where it was measured: the last brackets."""
    found = re.fullmatch(r"(.*?) \(([^()]*)\)", text)
    return (found[1], found[2]) if found else (text, "")


def _row(claims: list[Claim]) -> tuple[str, str, str, str, str]:
    """Lines that differ in where they were measured only are one row."""
    first, verdicts = claims[0], [claim.verdict for claim in claims]
    shown = [f"{where}: {claim.figures}" if (where := _split(claim.text)[1]) else claim.figures for claim in claims]
    counted = [f"{word} ({verdicts.count(word)} of {len(verdicts)})" for word in WORDS if word in verdicts]
    verdict = verdicts[0] if len(set(verdicts)) == 1 else ", ".join(counted)
    reasons = [claim.reason for claim in claims if claim.verdict != "holds" and claim.reason]
    verdict = f"{verdict}: {reasons[0]}" if reasons else verdict
    return first.source, first.theirs, _split(first.text)[0], "<br>".join(shown), verdict


def _counted(claims: Sequence[Claim]) -> str:
    """As "3 lines, 2 hold, 1 not reached"."""
    counts = ", ".join(
        f"{count} {word}" for verdict, word in WORDS.items() if (count := sum(c.verdict == verdict for c in claims))
    )
    return f"{len(claims)} lines, {counts or 'none judged'}"


INTRO = """# The papers' claims on the bundled pair

What five papers say, and whether it holds here: the headlines on this page, every line, table and figure in the
[appendix](papers-appendix.md), which like this page is written by `python -m benchmarks.papers` (about an hour on
one core; `--render` writes both from `benchmarks/results/papers`). The papers' figures come from other models, so
orders and ratios compare, absolute figures do not. Ours are the bundled pair's (a 6.4 M target, a 0.7 M draft, a
vocabulary of 2,048, Python's standard library), in float32, behind {scale.prompts} cuts of 15 held-out files,
{scale.tokens} tokens each, mostly with one set of random numbers at T > 0. They are
figures of acceptance: tokens per step count the token that every step adds. No speed here is a time: what is called
modelled is tokens / (1 + mu * draft forwards).

A line "A > B" *holds* when the 95 % bootstrap interval of the difference lies above 0, *does not hold* when it lies
below, and is *within noise* otherwise; then what it resolves is given, half the interval: a true difference of that
size is told half of the time. A line with a *limit* is judged against that in place of 0; one that says that two are
the same holds when the whole interval lies within the *margin* shown. Lines without an interval (block counts,
enumerated toys, bins of E(A), speeds and lengths to reach) compare the figures themselves. Files are resampled with
all their prompts, since cuts of a file are alike, and trainings too where there are several; intervals of 15 files
are somewhat narrow, and lines are not corrected for their number. *Not reached*: no measured tree accepts that much;
nothing is extrapolated. The papers' claims: {papers}. Lines that no paper claims stand apart in the appendix and are
not counted among these: {ours}."""
APPENDIX = """# The papers' claims: tables and lines

Generated; the summary is [papers.md](papers.md), which says how lines are judged. ± is half the 95 % bootstrap
interval over files of the figure itself. Nodes per step leave out the root. The package's proposers, rules and RNG
run in batches over a plain PyTorch Llama; the target is read along the walk only."""
