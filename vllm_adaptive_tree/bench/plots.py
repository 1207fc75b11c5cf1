"""Plots: tokens per second over concurrency, tokens per step over nodes."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.results import Row

MARKERS = "os^Dv<>*"  # one per concurrency


def draw(folder: Path, cells: Sequence[Cell], configs: Sequence[Config], rows: Sequence[Row]) -> list[Path]:
    """Write throughput.png and tokens_per_step.png; raises ImportError without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("the plots need matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, draw_one in (("throughput", _throughput), ("tokens_per_step", _tokens_per_step)):
        file = folder / f"{name}.png"
        figure = draw_one(pyplot, cells, configs, rows)
        if figure is not None:
            figure.savefig(file, dpi=130, bbox_inches="tight")
            pyplot.close(figure)
            written.append(file)
    return written


def _throughput(pyplot: Any, cells: Sequence[Cell], configs: Sequence[Config], rows: Sequence[Row]) -> Any:
    """Draw one panel per kind of load; bars are 90 % intervals."""
    panels: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        if _of(rows, cell):
            panels.setdefault((cell.place, cell.sampled), []).append(cell)
    if not panels:
        return None
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False)
    for axis, ((place, sampled), own) in zip(axes[0], panels.items(), strict=True):
        for color, config in enumerate(configs):
            points = [(cell.concurrency, row) for cell in own for row in _of(rows, cell) if row.config == config.name]
            if points:
                speeds = [row.tokens_per_second for _, row in points]
                axis.errorbar(
                    [x for x, _ in points],
                    [one.median for one in speeds],
                    [[one.median - one.low for one in speeds], [one.high - one.median for one in speeds]],
                    label=config.name,
                    color=f"C{color % 10}",
                    linestyle={"base": "--", "stress draft": ":"}.get(config.role, "-"),
                    marker="o",
                    markersize=4,
                    capsize=3,
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which("{x:g}")
        axis.tick_params(labelsize=8, which="both")
        axis.set_xticks([cell.concurrency for cell in own], [str(cell.concurrency) for cell in own])
        title = f"{place}, {'own sampling' if sampled else 'T = 0'}"
        axis.set(xlabel="concurrent requests", ylabel="tokens/s", title=title)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    return figure


def _tokens_per_step(pyplot: Any, cells: Sequence[Cell], configs: Sequence[Config], rows: Sequence[Row]) -> Any:
    """Draw offline and greedy cells; a chain is a tree of K nodes in a line."""
    own = [cell for cell in cells if cell.place == "offline" and not cell.sampled and _of(rows, cell)]
    if not own:
        return None
    figure, axis = pyplot.subplots(figsize=(5.4, 3.8))
    colors = {config.name: f"C{index % 10}" for index, config in enumerate(configs)}
    handles = []
    for cell, marker in zip(own, cycle(MARKERS), strict=False):
        for row in _of(rows, cell):
            label = row.config if cell is own[0] else None
            axis.scatter(row.nodes_per_step, row.tokens_per_step, color=colors[row.config], marker=marker, label=label)
        label = f"concurrency {cell.concurrency}"
        handles.append(pyplot.Line2D([], [], color="grey", marker=marker, linestyle="", label=label))
    chains = {config.name for config in configs if config.role == "chain"}
    line = sorted((row.nodes_per_step, row.tokens_per_step) for row in _of(rows, own[0]) if row.config in chains)
    axis.plot([x for x, _ in line], [y for _, y in line], color="grey", linewidth=0.8, zorder=0)
    axis.set(xlabel="nodes per request and step", ylabel="tokens per request and step")
    axis.grid(alpha=0.3)
    handles = [*axis.get_legend_handles_labels()[0], *handles]
    axis.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _of(rows: Sequence[Row], cell: Cell) -> list[Row]:
    return [row for row in rows if row.cell == cell.name]
