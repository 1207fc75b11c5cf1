"""The one table of a comparison."""

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table

COLUMNS = ("method", "tokens/step", "nodes/step", "tokens/s", "ratio", "output identical")


class Row(NamedTuple):
    method: str
    tokens_per_step: float  # per request and decode step
    nodes_per_step: float  # drafted, root not counted
    tokens_per_second: float
    ratio: float  # of tokens_per_second, against no speculation
    identical: bool  # token ids, against no speculation


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.method,
        f"{row.tokens_per_step:.2f}",
        f"{row.nodes_per_step:.1f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.ratio:.2f}",
        "yes" if row.identical else "no",
    )


def table(rows: Sequence[Row]) -> Table:
    result = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in COLUMNS:
        result.add_column(column, no_wrap=True, justify="left" if column == "method" else "right")
    for row in rows:
        result.add_row(*cells(row))
    return result


def remark(rows: Sequence[Row]) -> str | None:
    """What to say about methods that are slower than no speculation."""
    slower = [row.method for row in rows if row.ratio < 1]
    if not slower:
        return None
    return (
        f"Slower than no speculation here: {'; '.join(slower)}. Drafting and verifying cost more than the steps that "
        "they save: on a CPU every verified node is extra work."
    )
