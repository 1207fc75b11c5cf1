"""Two results of the benchmark side by side: ratios with intervals, and a verdict for each load."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.bench.plan import BASE
from vllm_adaptive_tree.bench.rounds import ROUNDS, SETTINGS, Measurement, Round
from vllm_adaptive_tree.bench.statistics import ByRound, Estimate, ratio, ratio_through

SAME_PROMPTS = "model", "prompts", "max_tokens", "requests_per_slot"
"""Settings with which rounds of one number decode the same prompts, in two runs."""


class Results(NamedTuple):
    """Finished rounds of a run."""

    folder: Path
    settings: Mapping[str, Any]
    rounds: Sequence[Round]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Read the folder of a run.

        Raises:
            ValueError: it holds no finished round.
        """
        settings, lines = folder / SETTINGS, folder / ROUNDS
        if not settings.is_file() or not lines.is_file():
            raise ValueError(f"{folder} holds no results of `vllm-adaptive-tree bench`: no {SETTINGS}, or no {ROUNDS}")
        rounds = [Round.from_json(json.loads(line)) for line in lines.read_text().splitlines()]
        return cls(folder, json.loads(settings.read_text()), rounds)

    def configs(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.rounds for name in one.measured))

    def cells(self) -> list[str]:
        return list(dict.fromkeys(one.cell for one in self.rounds))

    def measured(self, cell: str, config: str) -> dict[str, dict[int, Measurement]]:
        """By stage and number of the round."""
        found = dict[str, dict[int, Measurement]]()
        for one in self.rounds:
            if one.cell == cell and config in one.measured:
                found.setdefault(one.stage, {})[one.number] = one.measured[config]
        return found


class Compared(NamedTuple):
    """One load, the second configuration to the first."""

    cell: str
    first: str
    second: str
    speed: Estimate | None  # tokens per second
    tokens: Estimate | None  # per request and decode step; None: of other prompts
    verdict: str


def differing(first: Results, second: Results) -> dict[str, tuple[Any, Any]]:
    """Settings that two runs do not share."""
    keys = dict.fromkeys([*first.settings, *second.settings])
    pairs = {key: (first.settings.get(key), second.settings.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def compare(first: Results, second: Results, names: tuple[str, str] | None) -> list[Compared]:
    """Compare every load that both have; `names`: a configuration of each, None: those that both have.

    Raises:
        ValueError: they have nothing in common, or no configuration of that name.
    """
    for one, name in zip((first, second), names or (), strict=False):
        if name not in one.configs():
            raise ValueError(f"{one.folder} has no configuration {name!r}; it has {', '.join(one.configs())}")
    pairs = [names] if names else [(name, name) for name in first.configs() if name in second.configs()]
    pairs = [pair for pair in pairs if pair != (BASE, BASE)]
    cells = [cell for cell in first.cells() if cell in second.cells()]
    found = [_compared(first, second, cell, *pair) for cell, pair in product(cells, pairs)]
    known = [one for one in found if one is not None]
    if not known:
        raise ValueError(f"{first.folder} and {second.folder} have no load and configuration in common")
    return known


def _compared(first: Results, second: Results, cell: str, one: str, other: str) -> Compared | None:
    below, above = first.measured(cell, one), second.measured(cell, other)
    if not below or not above:
        return None
    speed = _speed(first, second, cell, above, below)
    same = all(first.settings.get(key) == second.settings.get(key) for key in SAME_PROMPTS)
    tokens = ratio(_by_number(above), _by_number(below)) if same else None
    return Compared(cell, one, other, speed, tokens, verdict(speed, one, other))


def _speed(
    first: Results,
    second: Results,
    cell: str,
    above: Mapping[str, Mapping[int, Measurement]],
    below: Mapping[str, Mapping[int, Measurement]],
) -> Estimate | None:
    """Ratio in rounds that were interleaved, else of the ratios to no speculation in each one's own rounds: another
    machine, or another load of it, changes both."""
    if first.folder == second.folder:
        for stage in above.keys() & below.keys():
            if (direct := ratio(_speeds(above[stage]), _speeds(below[stage]))) is not None:
                return direct
    bases = second.measured(cell, BASE), first.measured(cell, BASE)
    for here, there in product(above.keys() & bases[0].keys(), below.keys() & bases[1].keys()):
        rounds = above[here], bases[0][here], below[there], bases[1][there]
        if (through := ratio_through(*map(_speeds, rounds))) is not None:
            return through
    return None


def _speeds(rounds: Mapping[int, Measurement]) -> ByRound:
    return {number: one.speed for number, one in rounds.items()}


def _by_number(stages: Mapping[str, Mapping[int, Measurement]]) -> ByRound:
    """Tokens of a decode step, of all stages."""
    rounds = [item for stage in stages.values() for item in stage.items()]
    return {number: one.decode_tokens / max(1, one.decode_steps) for number, one in rounds}


def verdict(speed: Estimate | None, first: str, second: str) -> str:
    if speed is None:
        return "not in enough rounds beside no speculation"
    if speed.low <= 1 <= speed.high:
        return "no difference shown"
    return f"{_which(speed.low > 1, first, second)} is faster"


def _which(second_wins: bool, first: str, second: str) -> str:
    if first == second:
        return "B" if second_wins else "A"
    return second if second_wins else first


def summary(found: Iterable[Compared]) -> str:
    """Verdict of all loads."""
    judged = [one for one in found if one.speed is not None]
    faster = sum(one.speed.low > 1 for one in judged if one.speed)
    slower = sum(one.speed.high < 1 for one in judged if one.speed)
    return f"B is faster in {faster} of {len(judged)} comparisons, slower in {slower}"
