"""Sections of the tables' page: tables, lines and heat maps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.judging import Claim


class Section(NamedTuple):
    paper: str  # "": none
    title: str
    parts: list[str]  # Markdown
    claims: list[Claim]

    @property
    def papers(self) -> list[Claim]:
        """The lines that a paper claims."""
        return [claim for claim in self.claims if claim.source]

    def markdown(self) -> str:
        found = [f"## {self.title}", *self.parts]
        ours = [claim for claim in self.claims if not claim.source]
        if self.papers:
            rows = [(claim.text, *_verdict(claim), claim.source, claim.theirs) for claim in self.papers]
            heads = ("line", "verdict", "difference or figures", "why", "where the paper says it", "the paper's")
            found += ["What the paper says, and what we see:", table(heads, rows)]
        if ours:
            rows = [(claim.text, *_verdict(claim)) for claim in ours]
            found += ["Ours, which no paper claims:", table(("line", "verdict", "difference or figures", "why"), rows)]
        return "\n\n".join(found)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    assert all(len(row) == len(heads) for row in rows)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_shown(x) for x in line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _verdict(claim: Claim) -> tuple[str, str, str]:
    return claim.verdict, claim.figures, "" if claim.verdict == "holds" else claim.reason


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
