"""Sections of the docs: tables, claims, heat maps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.judging import Claim
from benchmarks.papers.scale import Scale


class Section(NamedTuple):
    title: str
    parts: list[str]  # Markdown
    claims: list[Claim]

    def markdown(self) -> str:
        return "\n\n".join(
            [f"## {self.title}", *self.parts, "What the paper says, and what we see:", _lines(self.claims)]
        )


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    assert all(len(row) == len(heads) for row in rows)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_shown(x) for x in line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


UNEXPLAINED = {"within noise": "not resolved by these prompts", "does not hold": "unexplained"}


def _lines(claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        explained = "" if claim.verdict == "holds" else claim.reason or UNEXPLAINED[claim.verdict]
        rows.append((claim.text, claim.verdict, claim.figures, explained))
    return table(("line", "verdict", "difference or figures", "why"), rows)


def heat_map(file: Path, pairs: Sequence[tuple[float, int]], title: str) -> None:
    """Each bin of E(A) is a column: the distribution of the accepted tokens A in it.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("the heat maps need matplotlib: pip install -r requirements/dev.txt") from error
    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    expected, accepted = np.array(pairs).T
    bins = np.arange(0, expected.max() + 0.5, 0.5)
    counts, across, up = np.histogram2d(expected, accepted, (bins, np.arange(-0.5, accepted.max() + 1.5)))
    steps = counts.sum(1, keepdims=True)
    share = np.where(steps >= 10, counts / np.maximum(steps, 1), np.nan)  # fewer say nothing
    figure, axes = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
    shown = axes.pcolormesh(across, up, share.T, cmap="viridis", vmin=0)
    axes.plot([0, bins[-1]], [0, bins[-1]], color="white", linewidth=1, linestyle="--")
    axes.set(xlabel="E(A) of the tree", ylabel="accepted tokens A", title=title, ylim=(up[0], up[-1]))
    figure.colorbar(shown, label="share of the steps in the column")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def page(sections: Sequence[Section], scale: Scale) -> str:
    claims = [claim for section in sections for claim in section.claims]
    counts = ", ".join(f"{sum(c.verdict == verdict for c in claims)} {word}" for verdict, word in WORDS.items())
    return (
        "\n\n".join([INTRO.format(scale=scale, lines=len(claims), counts=counts), *(s.markdown() for s in sections)])
        + "\n"
    )


WORDS = {"holds": "hold", "within noise": "are within noise", "does not hold": "do not hold"}
INTRO = """# The papers' figures on the bundled pair

One section per paper: ours beside theirs. Theirs come from other models (named beside each figure), so orders and
ratios compare, absolute figures do not. Ours are the bundled pair's (a 6.4 M target, a 0.7 M draft, a vocabulary of
2,048, the text of Python's standard library), in float32, behind beginnings and middles of modules held out from its
training: {scale.prompts} prompts for greedy cells, {scale.sampled_prompts} for sampled ones, {scale.tokens} tokens
each. They are figures of acceptance: tokens per step count the token that every step adds, nodes per step leave out the
root. Nothing here is a speed.

± is half the 95 % bootstrap interval over prompts of the figure itself. A line "A >= B" is judged by the 95 % interval
of the difference over prompts that both decoded, resampled together: it *holds* when the interval lies above 0, *does
not hold* when it lies below, and is *within noise* otherwise. At T > 0 both also differ by their draws. Of {lines}
lines, {counts}.

`python -m benchmarks.papers` measures, in a quarter of an hour on two idle cores, and writes this page (`--render`
writes it from `benchmarks/results/papers`). It runs the package's proposers, rules and RNG in batches over a plain
PyTorch Llama; the target is read along the walk only."""
