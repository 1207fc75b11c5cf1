"""Tables of results, the same on the console and in Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from vllm_adaptive_tree.bench.first import FirstRow
from vllm_adaptive_tree.bench.offline import FIRST_STEPS
from vllm_adaptive_tree.bench.plan import Cell
from vllm_adaptive_tree.bench.projection import Projected
from vllm_adaptive_tree.bench.results import PHASES, BurstyRow, Row
from vllm_adaptive_tree.bench.statistics import MIN_ROUNDS, Estimate

R = TypeVar("R")
Columns = Mapping[str, Callable[[R], str]]
"""Header -> cell."""

NONE = "-"


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def estimate(value: Estimate | None, digits: int) -> str:
    if value is None:
        return NONE
    return f"{value.median:,.{digits}f} [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:.1f}"


def _phase(name: str, row: Row) -> str:
    return _milliseconds(row.phases.get(name))


SPEED: Columns[Row] = {
    "method": lambda row: row.config,
    "tokens/s": lambda row: estimate(row.tokens_per_second, 1),
    "vs. no speculation": lambda row: estimate(row.to_base, 2),
    "vs. best chain": lambda row: (
        estimate(row.to_best_chain, 2) + (f" ({row.best_chain})" if row.best_chain and row.to_best_chain else "")
    ),
    "tokens/step": lambda row: f"{row.tokens_per_step:.2f}",
    "nodes/step": lambda row: f"{row.nodes_per_step:.1f}",
    "identical": lambda row: NONE if row.identical is None else f"{row.identical:.0%}",
    "rounds": lambda row: str(row.rounds),
}
TIME: Columns[Row] = {
    "method": lambda row: row.config,
    "step ms": lambda row: _milliseconds(row.step),
    **{f"{name} ms": partial(_phase, name) for name in PHASES},
    "outside models": lambda row: NONE if row.outside is None else f"{row.outside:.1%}",
    "p50 ms": lambda row: _milliseconds(row.time_per_token_p50),
    "p99 ms": lambda row: _milliseconds(row.time_per_token_p99),
    "memory MiB": lambda row: f"{row.memory / 2**20:,.0f}",
}
BURSTY: Columns[BurstyRow] = {
    "method": lambda row: row.config,
    "requests": lambda row: str(row.concurrency),
    "tokens/s": lambda row: estimate(row.tokens_per_second, 1),
    "best fixed": lambda row: row.best_fixed or NONE,
    "vs. best fixed": lambda row: estimate(row.to_best_fixed, 2),
}
FIRST: Columns[FirstRow] = {
    "method": lambda row: row.config,
    "cell": lambda row: row.cell,
    "cold tokens/s": lambda row: estimate(row.cold, 1),
    "warm tokens/s": lambda row: estimate(row.warm, 1),
    "warm vs. cold": lambda row: estimate(row.to_cold, 2),
    "rounds": lambda row: str(row.rounds),
}
PROJECTION: Columns[Projected] = {
    "cell": lambda row: row.cell,
    "method": lambda row: row.config,
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "vs. no speculation": lambda row: f"{row.to_base:.2f}",
}
LEFT = ("method", "best fixed", "cell", "A", "B", "verdict")
MIN_WIDTH = 140  # of the console, so that no interval is cut off

SPEED_NOTE = (
    "tokens/s: median over rounds [90 % bootstrap interval], prefill included. vs.: median of the ratios of "
    "interleaved rounds and its interval; of two that were never interleaved, through one that was with both; none "
    f"from fewer than {MIN_ROUNDS} rounds."
)
TOKENS_NOTE = (
    "tokens/step and nodes/step: per request and decode step. identical: fraction of greedy requests with the same "
    "tokens as without speculation."
)
STEP_NOTE = (
    "step: wall time of an engine step; its phases are known for trees only. outside models: fraction of a step spent "
    "neither drafting nor verifying. p50, p99: time per output token of a request, without the first. memory: peak "
    "resident size of the engine's processes."
)
BUSY_CORES = 0.1  # used by other programs, for a warning


def warnings(rows: Sequence[Row]) -> list[str]:
    found = []
    if any(row.repaired for row in rows):
        found.append(
            "The chains' sampling was repaired: on CPUs, vLLM's own reads temperature, top-k and top-p of draft "
            "tokens from memory that it never wrote, and its output is not the model's (vLLM issue 55005)."
        )
    if (busy := max((row.other_cores for row in rows), default=0.0)) > BUSY_CORES:
        found.append(f"Other programs kept up to {busy:.1f} cores busy: do not trust the times.")
    return found


def table(title: str, columns: Columns[R], rows: Iterable[R]) -> Table:
    return Table(title, tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in rows])


def speed(cells: Sequence[Cell], rows: Sequence[Row], columns: Columns[Row] = SPEED) -> list[Table]:
    found = [table(cell.title, columns, [row for row in rows if row.cell == cell.name]) for cell in cells]
    return [one for one in found if one.rows]


def steps(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Table]:
    return [one._replace(title=f"{one.title}: a step") for one in speed(cells, rows, TIME)]


def bursty(rows: Sequence[BurstyRow]) -> list[Table]:
    return [table("bursty load", BURSTY, rows)] if rows else []


def first(rows: Sequence[FirstRow]) -> list[Table]:
    return [table(f"the first {FIRST_STEPS} steps of an engine", FIRST, rows)] if rows else []


def projection(name: str, projected: Sequence[Projected]) -> Table:
    title = f"a projection, not a measurement: the acceptance above under the costs of {name}"
    return table(title, PROJECTION, projected)


def headline(settings: Mapping[str, Any]) -> str:
    enlarged = settings["enlarged"]
    target = f"`{settings['model']}`"
    if enlarged:
        target += f", enlarged to {enlarged['parameters']:,} parameters with the same function"
    per_slot, threads = settings.get("requests_per_slot"), settings["threads"]
    return (
        f"Target {target}; draft `{settings['draft']}`; {settings['dtype']}, "
        f"{'eager' if settings['eager'] else 'compiled'}; {threads} {'thread' if str(threads) == '1' else 'threads'}; "
        f"{settings['max_tokens']} new tokens per request"
        + (f", {per_slot} requests per concurrent request." if per_slot else ".")
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
    """Print to a rich console."""
    console.print(headline(settings), "")
    show_tables(console, found)
    console.print(*notes, sep="\n")


def print_tables(found: Iterable[Table]) -> None:
    """Print to the terminal, so wide that no interval is cut."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, MIN_WIDTH)
    show_tables(console, found)


def show_tables(console: Any, found: Iterable[Table]) -> None:
    from rich import box
    from rich.table import Table as RichTable

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
