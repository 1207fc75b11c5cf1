"""The results as tables: on the console and in Markdown, the same cells."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_adaptive_tree.bench.first import FirstRow
from vllm_adaptive_tree.bench.offline import FIRST_STEPS
from vllm_adaptive_tree.bench.projection import Projected
from vllm_adaptive_tree.bench.results import PHASES, Row, SwingRow
from vllm_adaptive_tree.bench.statistics import ENOUGH, Estimate

NONE = "-"
WIDTH = 140  # of the console, at least: an interval that is cut off says nothing


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


SPEED = ("method", "tokens/s", "to no speculation", "to best chain", "tokens/step", "nodes/step", "identical", "rounds")
TIME = ("method", "step ms", *(f"{name} ms" for name in PHASES), "outside models", "p50 ms", "p99 ms", "memory MiB")
SWING = ("method", "requests", "tokens/s", "best fixed", "to best fixed")
FIRST = ("method", "cell", "cold tokens/s", "warm tokens/s", "warm to cold", "rounds")
PROJECTION = ("cell", "method", "tokens/s", "to no speculation")
LEFT = ("method", "best fixed", "cell")

NOTES = (
    "tokens/s: median over rounds [90 % bootstrap interval], prefill included. Ratios: of rounds side by side, their "
    "median and interval; of two in different groups, through one that ran beside both; none from fewer than "
    f"{ENOUGH} rounds.",
    "tokens/step and nodes/step: per request and decode step. identical: share of greedy requests whose tokens are "
    "those without speculation.",
    "step: wall time of a step of the engine; its phases are known for trees. outside models: share of a step that is "
    "neither draft nor verify. p50, p99: time per output token of a request, its first excepted. memory: peak resident "
    "size of the engine's processes.",
)


ENOUGH_OTHERS = 0.1  # cores, for a warning


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the tables has to know."""
    found = list(NOTES)
    if any(row.repaired for row in rows):
        found.append(
            "The chains' sampling was repaired: on CPUs, vLLM's own reads temperature, top-k and top-p of draft "
            "tokens from memory that it never wrote, and its output is not the model's (vLLM issue 55005)."
        )
    if (busy := max((row.other_cores for row in rows), default=0.0)) > ENOUGH_OTHERS:
        found.append(f"Other programs kept up to {busy:.1f} cores busy: do not trust the times.")
    return found


def tables(rows: Sequence[Row], swing: Sequence[SwingRow]) -> list[Table]:
    cells = list(dict.fromkeys(row.cell for row in rows))
    found = [Table(cell, SPEED, [_speed(row) for row in rows if row.cell == cell]) for cell in cells]
    found += [Table(f"{cell}: a step", TIME, [_time(row) for row in rows if row.cell == cell]) for cell in cells]
    if swing:
        found.append(Table("a load that swings", SWING, [_swing(row) for row in swing]))
    return found


def first(rows: Sequence[FirstRow]) -> list[Table]:
    lines = [
        (
            one.config,
            one.cell,
            _estimate(one.cold, 1),
            _estimate(one.warm, 1),
            _estimate(one.to_cold, 2),
            str(one.rounds),
        )
        for one in rows
    ]
    return [Table(f"the first {FIRST_STEPS} steps of an engine", FIRST, lines)] if lines else []


def projection(name: str, projected: Sequence[Projected]) -> Table:
    lines = [(one.cell, one.config, f"{one.tokens_per_second:,.0f}", f"{one.to_base:.2f}") for one in projected]
    return Table(f"a projection, not a measurement: the acceptance above under the costs of {name}", PROJECTION, lines)


def headline(settings: Mapping[str, Any]) -> str:
    enlarged = settings["enlarged"]
    target = f"`{settings['model']}`"
    if enlarged:
        target += f", enlarged to {enlarged['parameters']:,} parameters without a change of its function"
    waves = f", {settings['waves']} requests for each that runs at a time" if settings.get("waves") else ""
    return (
        f"Target {target}; draft `{settings['draft']}`; {settings['dtype']}, "
        f"{'eager' if settings['eager'] else 'compiled'}; {settings['threads']} threads; {settings['max_tokens']} new "
        f"tokens per request{waves}."
    )


def markdown(
    settings: Mapping[str, Any], found: Iterable[Table], notes: Iterable[str], failures: Mapping[str, str]
) -> str:
    parts = [headline(settings)]
    for table in found:
        lines = [table.columns, tuple("---" for _ in table.columns), *table.rows]
        parts += [f"### {table.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    parts += notes
    parts += [f"Did not run: {stage}: {reason}" for stage, reason in failures.items()]
    return "\n\n".join(parts) + "\n"


def show(console: Any, settings: Mapping[str, Any], found: Iterable[Table], notes: Iterable[str]) -> None:
    from rich import box
    from rich.table import Table as RichTable

    console.width = max(console.width, WIDTH)
    console.print(headline(settings), "")
    for table in found:
        shown = RichTable(
            box=box.SIMPLE,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
            title=table.title,
            title_justify="left",
        )
        for column in table.columns:
            shown.add_column(column, no_wrap=True, justify="left" if column in LEFT else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, "")
    console.print(*notes, sep="\n")


def _speed(row: Row) -> tuple[str, ...]:
    best = f" ({row.best_chain})" if row.best_chain and row.to_best_chain else ""
    return (
        row.config,
        _estimate(row.tokens_per_second, 1),
        _estimate(row.to_base, 2),
        _estimate(row.to_best_chain, 2) + best,
        f"{row.tokens_per_step:.2f}",
        f"{row.nodes_per_step:.1f}",
        NONE if row.identical is None else f"{row.identical:.0%}",
        str(row.rounds),
    )


def _time(row: Row) -> tuple[str, ...]:
    return (
        row.config,
        _milliseconds(row.step),
        *(_milliseconds(row.phases.get(name)) for name in PHASES),
        NONE if row.outside is None else f"{row.outside:.1%}",
        _milliseconds(row.time_per_token_p50),
        _milliseconds(row.time_per_token_p99),
        f"{row.memory / 2**20:,.0f}",
    )


def _swing(row: SwingRow) -> tuple[str, ...]:
    return (
        row.config,
        str(row.concurrency),
        _estimate(row.tokens_per_second, 1),
        row.best_fixed or NONE,
        _estimate(row.to_best_fixed, 2),
    )


def _estimate(value: Estimate | None, digits: int) -> str:
    if value is None:
        return NONE
    return f"{value.median:,.{digits}f} [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:.1f}"
