"""What the engines are asked to continue: beginnings of functions and classes of Python's standard library."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from vllm_adaptive_tree.bench.prompts import PROMPTS

FEWEST, WAVES, ENOUGH = 4, 3, 64
"""Requests of a round: at least, for each of those that run at a time, and no more unless more run at a time."""
LINES = 4
MOST = 400
"""Prompts; later rounds begin again."""


@cache
def standard() -> tuple[str, ...]:
    """The demo's prompts and cuts of the standard library's top modules, in an order that never changes."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines = file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
        starts = [index for index, line in enumerate(lines) if line.startswith(("def ", "class "))]
        found += ["".join(lines[start : start + LINES]) for start in starts[1:4]]
    random.Random(0).shuffle(found)
    return (*PROMPTS, *found)[:MOST]


def load(prompts: Sequence[str], concurrency: int, number: int, waves: int | None = None) -> list[str]:
    """The prompts of round `number` (the warm-up is 0), of which `concurrency` run at a time; `waves` so many."""
    count = max(FEWEST, concurrency, min(WAVES * concurrency, ENOUGH)) if waves is None else waves * concurrency
    return [prompts[(number * count + index) % len(prompts)] for index in range(count)]


def phase_prompts(prompts: Sequence[str], most: int, phase: int) -> Iterator[str]:
    """Those of one phase of a swing, however many others have come through: reading them is most of a burst's work."""
    return islice(cycle(prompts), WAVES * most * phase % len(prompts), None)


def checksum(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:12]
