"""New code of a release that may break this package though no symbol has moved, to be read by a person."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tools.vllm_diff.sources import Sources
from tools.vllm_diff.uses import Use

WATCHED = (
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.sampling_params",
    "vllm.v1.core.sched",
    "vllm.v1.engine.core",
    "vllm.v1.outputs",
    "vllm.v1.structured_output",
    "vllm.v1.worker",
)
"""Modules, or packages, whose new lines may decide what a step with drafts does."""

SPEAKS = re.compile(r"draft|specul|spec_(?:decode|tok)|num_spec", re.IGNORECASE)
LEAST = 12
"""Letters of a name that we replace; a shorter one is too common to be searched as a word."""


class News(NamedTuple):
    module: str
    line: int
    text: str
    why: str  # "drafts", or the name that we replace

    def __str__(self) -> str:
        return f"{self.module}:{self.line} ({self.why}): {self.text}"


def news(found: Iterable[Use], old: Sources, new: Sources) -> list[News]:
    """New lines of watched modules that speak of drafts, and new callers of what we replace."""
    names = {use.path[-1] for use in found if use.replaced}
    names = {name for name in names if len(name) >= LEAST and not name.startswith("__") and not SPEAKS.search(name)}
    replaced = re.compile(rf"\b({'|'.join(sorted(names))})(?:\.\w+)?\(") if names else None
    return [
        News(module, number, text, found_name)
        for module in new.modules
        if any(f"{module}.".startswith(f"{one}.") for one in WATCHED)
        for number, text in _added(old.text(module) if module in old else "", new.text(module))
        if (found_name := _why(text, replaced)) is not None
    ]


def _why(text: str, replaced: re.Pattern[str] | None) -> str | None:
    if match := replaced and replaced.search(text):
        return match[1]
    return "drafts" if SPEAKS.search(text) else None


def _added(old: str, new: str) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines of code that `new` has more often than `old`; moved ones are none."""
    left = Counter(map(str.strip, old.splitlines()))
    for number, line in enumerate(map(str.strip, new.splitlines()), 1):
        if left[line]:
            left[line] -= 1
        elif not line.startswith("#"):
            yield number, line
