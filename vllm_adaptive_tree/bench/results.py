"""Results: one row per cell and configuration, from the rounds of a run."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from statistics import fmean
from statistics import median as median_of
from typing import Any

from vllm_adaptive_tree.bench.plan import BASE, Cell, Config
from vllm_adaptive_tree.bench.provenance import provenance
from vllm_adaptive_tree.bench.rounds import Measurement, Round
from vllm_adaptive_tree.bench.statistics import ByRound, Estimate, median, percentile, ratio, ratio_through, row_to_json

PHASES = ("draft", "tree", "verify", "accept", "commit")
FORWARDS = ("draft", "verify")
"""Phases in which a model runs."""


@dataclass(frozen=True, slots=True)
class Row:
    cell: str
    config: str
    rounds: int
    tokens_per_second: Estimate
    to_base: Estimate | None
    to_best_chain: Estimate | None
    best_chain: str | None
    tokens_per_step: float  # per request and decode step
    nodes_per_step: float  # likewise, steps without a draft included
    nodes_by_depth: dict[str, float]  # likewise; of a tree method
    step: float  # seconds, of the engine
    phases: dict[str, float]  # seconds per step; of a tree method
    outside: float | None  # share of a step that is neither model's forward
    time_per_token_p50: float | None  # seconds
    time_per_token_p99: float | None
    memory: int  # bytes
    other_cores: float  # that other programs kept busy, in the median round
    repaired: bool  # see vllm_55005.py
    identical: float | None  # share of greedy requests whose tokens are the base's


@dataclass(frozen=True, slots=True)
class BurstyRow:
    """Result of one phase of a bursty load."""

    config: str
    concurrency: int
    tokens_per_second: Estimate
    best_fixed: str | None  # the best fixed configuration of this phase
    to_best_fixed: Estimate | None


class Series:
    """Rounds of one cell, by stage and configuration."""

    def __init__(self, cell: Cell, rounds: Iterable[Round]):
        self.cell = cell
        self.rounds = [one for one in rounds if one.cell == cell.name]
        self.stages = list(dict.fromkeys(one.stage for one in self.rounds))
        self.configs = list(dict.fromkeys(name for one in self.rounds for name in one.measured))

    def of(self, config: str) -> list[Measurement]:
        return [one.measured[config] for one in self.rounds if config in one.measured]

    def speeds(self, config: str, stage: str | None = None, phase: str | None = None) -> ByRound:
        """Tokens per second of one stage, by the number of the round; of all stages, by a running number."""
        chosen = [one for one in self.rounds if config in one.measured and stage in (None, one.stage)]
        return {one.number if stage else index: _speed(one.measured[config], phase) for index, one in enumerate(chosen)}

    def compared(self, config: str, other: str, phase: str | None = None) -> Estimate | None:
        """Ratio of `config` to `other`: in interleaved rounds if there are enough, else through a third configuration
        that was interleaved with both."""
        for stage in self.stages:
            direct = ratio(self.speeds(config, stage, phase), self.speeds(other, stage, phase))
            if direct is not None:
                return direct
        for here, there in product(self.stages, repeat=2):
            for third in self.configs:
                found = ratio_through(
                    self.speeds(config, here, phase),
                    self.speeds(third, here, phase),
                    self.speeds(other, there, phase),
                    self.speeds(third, there, phase),
                )
                if found is not None:
                    return found
        return None

    def best(self, names: Sequence[str], phase: str | None = None) -> str | None:
        """Fastest of those that ran, relative to the base."""
        found = {}
        for name in names:
            if name == BASE and self.of(BASE):
                found[name] = 1.0
            elif self.of(name) and (against := self.compared(name, BASE, phase)):
                found[name] = against.median
        return max(found, key=found.__getitem__) if found else None

    def identical(self, config: str) -> float | None:
        """Fraction of requests with the same tokens as the base in the round of that number, which has the same
        prompts."""
        if self.cell.sampled or self.cell.place == "bursty":
            return None
        base = {one.number: one.measured[BASE].outputs for one in self.rounds if BASE in one.measured}
        pairs = [
            (one.measured[config].outputs, base[one.number])
            for one in self.rounds
            if config in one.measured and one.number in base
        ]
        same = [one == other for ours, plain in pairs for one, other in zip(ours, plain, strict=True)]
        return fmean(same) if same else None


def rows(cells: Sequence[Cell], configs: Sequence[Config], rounds: Sequence[Round]) -> list[Row]:
    found = []
    chains = [config.name for config in configs if config.role == "chain"]
    for cell in cells:
        if cell.place == "bursty":
            continue
        series = Series(cell, rounds)
        best = series.best(chains)
        for config in configs:
            if measured := series.of(config.name):
                found.append(_row(series, config, measured, best))
    return found


def bursty_rows(cells: Sequence[Cell], configs: Sequence[Config], rounds: Sequence[Round]) -> list[BurstyRow]:
    found = []
    for cell in cells:
        if cell.place != "bursty":
            continue
        series = Series(cell, rounds)
        for concurrency in (1, cell.concurrency):
            phase = str(concurrency)
            best = series.best([config.name for config in configs if config.fixed], phase)
            for config in configs:
                if not series.of(config.name):
                    continue
                speed = median(series.speeds(config.name, phase=phase))
                assert speed is not None
                against = series.compared(config.name, best, phase) if best and best != config.name else None
                found.append(BurstyRow(config.name, concurrency, speed, best, against))
    return found


def _row(series: Series, config: Config, measured: Sequence[Measurement], best: str | None) -> Row:
    speed = median(series.speeds(config.name))
    assert speed is not None
    steps = max(1, sum(one.steps for one in measured))
    decode_steps = max(1, sum(one.decode_steps for one in measured))
    seconds = sum(one.seconds for one in measured)
    spent = {name: sum(one.phases.get(name, 0.0) for one in measured) for name in PHASES}
    per_token = list(chain.from_iterable(one.time_per_token for one in measured))
    is_tree = any(one.phases for one in measured)
    other = best if best and best != config.name and config.role != "base" else None
    return Row(
        cell=series.cell.name,
        config=config.name,
        rounds=len(measured),
        tokens_per_second=speed,
        to_base=None if config.role == "base" else series.compared(config.name, BASE),
        to_best_chain=series.compared(config.name, other) if other else None,
        best_chain=other,
        tokens_per_step=sum(one.decode_tokens for one in measured) / decode_steps,
        nodes_per_step=sum(one.nodes for one in measured) / decode_steps,
        nodes_by_depth={
            depth: sum(one.depths.get(depth, 0) for one in measured) / decode_steps
            for depth in sorted({depth for one in measured for depth in one.depths}, key=int)
        },
        step=seconds / steps,
        phases={name: value / steps for name, value in spent.items()} if is_tree else {},
        outside=1 - sum(spent[name] for name in FORWARDS) / seconds if is_tree else None,
        time_per_token_p50=percentile(per_token, 0.5),
        time_per_token_p99=percentile(per_token, 0.99),
        memory=max(one.memory for one in measured),
        other_cores=median_of(one.other_cores for one in measured),
        repaired=any(one.repaired for one in measured),
        identical=None if config.role == "base" else series.identical(config.name),
    )


def _speed(one: Measurement, phase: str | None) -> float:
    if phase is None:
        return one.speed
    tokens, seconds = one.bursty[phase]
    return tokens / seconds


def to_json(
    settings: Mapping[str, Any], rows: Sequence[Row], bursty: Sequence[BurstyRow], failures: Mapping[str, str]
) -> dict[str, Any]:
    phases = [row_to_json(row) for row in bursty]
    steady = [row_to_json(row) for row in rows]
    told = {"provenance": provenance(), "settings": settings}
    return {**told, "rows": steady, "bursty": phases, "failures": failures}


def to_csv(rows: Sequence[Row]) -> str:
    """Rows as text; an estimate as its median, NAME_low and NAME_high, a phase as a column of its own."""
    lines = []
    for row in map(row_to_json, rows):
        line: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, dict) and "median" in value:
                line |= {name: value["median"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
            elif isinstance(value, dict):
                line |= {f"{name}_{key}": part for key, part in value.items()}
            else:
                line[name] = value
        lines.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
