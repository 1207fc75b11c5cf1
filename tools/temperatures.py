"""Draws docs/figures/temperatures.svg: tokens per step over temperature by method, on SmolLM2.

python -m tools.temperatures
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, FIGURE = ROOT / "benchmarks" / "results" / "smollm2.json", ROOT / "docs" / "figures" / "temperatures.svg"
METHODS = ("adaptive_tree", "opt_tree", "sequoia", "dyspec")
CHAIN = "vLLM's best chain"
COLOURS = ("#2da44e", "#bf8700", "#8250df", "#cf222e", "#6e7781")
Curve = list[tuple[float, float, float]]
"""Temperature, tokens per step and their standard error."""


def curves(rows: list[dict[str, Any]], prompts: str) -> dict[str, Curve]:
    """Curves of the methods with 24 nodes, and of the best chain at each temperature."""
    own = [row for row in rows if row["prompts"] == prompts]
    found = {
        method: _curve([row for row in own if row["configuration"] == f"{method}, 24 nodes"]) for method in METHODS
    }
    chains = [row for row in own if row["configuration"].startswith("vLLM's chain")]
    best = [max(at, key=lambda row: row["tokens_per_step"]) for at in _by_temperature(chains)]
    return {**found, CHAIN: _curve(best)}


def _by_temperature(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[row for row in rows if row["temperature"] == t] for t in sorted({row["temperature"] for row in rows})]


def _curve(rows: list[dict[str, Any]]) -> Curve:
    return sorted((row["temperature"], row["tokens_per_step"], row["standard_error"]) for row in rows)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "temperatures", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot

    ink = "#6e7781"  # for light and dark pages
    figure, both = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    for axes, prompts in zip(both, ("HumanEval", "chat"), strict=True):
        for (name, curve), colour in zip(curves(rows, prompts).items(), COLOURS, strict=True):
            t, tokens, error = zip(*curve, strict=True)
            axes.errorbar(
                t, tokens, error, label=name, color=colour, marker="o", capsize=3, ls="-" if name != CHAIN else "--"
            )
        axes.set_title(prompts, color=ink)
        axes.set_xlabel("temperature", color=ink)
        axes.tick_params(colors=ink)
        axes.grid(alpha=0.3)
        axes.set_facecolor("none")
        for spine in axes.spines.values():
            spine.set_color(ink)
    both[0].set_ylabel("tokens per step", color=ink)
    both[0].set_ylim(bottom=1)
    both[1].legend(labelcolor=ink, framealpha=0, loc="lower left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text())["rows"], FIGURE)
    print(f"{FIGURE}: {FIGURE.stat().st_size} bytes")
