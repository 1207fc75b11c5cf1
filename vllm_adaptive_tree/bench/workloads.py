"""Prompts of a benchmark: beginnings of functions and classes of Python's standard library."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

from vllm_adaptive_tree.bench.plan import Cell
from vllm_adaptive_tree.bench.prompts import PROMPTS

T = TypeVar("T")

MIN_REQUESTS, REQUESTS_PER_SLOT, MAX_REQUESTS = 4, 3, 64
"""Requests per round: at least, per concurrent request, and at most unless more are concurrent."""
LINES_PER_PROMPT = 4
MAX_PROMPTS = 400
"""Most prompts; later rounds start over."""


@cache
def standard_library() -> tuple[str, ...]:
    """Prompts of the demo and excerpts of the standard library's top modules, in a fixed order."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines = file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
        starts = [index for index, line in enumerate(lines) if line.startswith(("def ", "class "))]
        found += ["".join(lines[start : start + LINES_PER_PROMPT]) for start in starts[1:4]]
    random.Random(0).shuffle(found)
    return (*PROMPTS, *found)[:MAX_PROMPTS]


def prompt_indices(cell: Cell, number: int, prompts: int) -> list[int]:
    """Indices of the prompts, of `prompts`, that round `number` of a cell reads; round 0 is the warm-up."""
    default = max(MIN_REQUESTS, cell.concurrency, min(REQUESTS_PER_SLOT * cell.concurrency, MAX_REQUESTS))
    count = default if cell.requests is None else cell.requests
    return [(number * count + index) % prompts for index in range(count)]


def mixed_length(prompt: int, usual: int) -> int:
    """New tokens of a prompt, by its index, in a mixed load: half to one and a half times the usual number."""
    return max(1, usual * (2 + prompt % 5) // 4)


def prompts_of_phase(prompts: Sequence[T], concurrency: int, phase: int) -> Iterator[T]:
    """Prompts of one phase of a bursty load, the same however many requests finished in earlier phases.

    Reading prompts is most of a burst's work, so every engine must read the same ones.
    """
    return islice(cycle(prompts), REQUESTS_PER_SLOT * concurrency * phase % len(prompts), None)


def checksum(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:12]
