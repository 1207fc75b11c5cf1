"""Projection of the measured acceptance to the costs of other hardware, with the same trees."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.results import Row
from vllm_adaptive_tree.budget import Costs


class Hardware(NamedTuple):
    """Costs of one pair of models on one machine, as a cost file has them."""

    name: str  # tells if they were measured or estimated
    costs: Costs
    step: float = 0.0  # seconds of a step outside both models

    def seconds(self, requests: int, nodes: float, levels: float) -> float:
        """Seconds of a step of `requests` with `nodes` nodes each, drafted in `levels` levels."""
        draft = levels * self.costs.draft.cost(requests * nodes / levels) if levels else 0.0
        return self.costs.verify.cost(requests * (1 + nodes)) + draft + self.step

    def to_json(self) -> dict[str, Any]:
        """Content of a cost file, which `tree: {"cost_profile": ..}` reads too."""
        return {"name": self.name, "step": self.step, "costs": self.costs.to_json()}


class Projected(NamedTuple):
    cell: str
    config: str
    tokens_per_second: float
    to_base: float


def read_hardware(file: Path) -> Hardware:
    """Read a cost file: one of `vllm-adaptive-tree costs`, or a cost profile that an engine wrote.

    Raises ValueError if the file contains no costs.
    """
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        found = Hardware(str(data.get("name", file.stem)), Costs.from_json(data["costs"]), float(data.get("step", 0)))
        if found.step < 0:
            raise ValueError('"step" is negative')
        return found
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"--project: {str(file)!r} holds no costs ({type(error).__name__}: {error}); it needs name, step (seconds) "
            'and costs: {"verify": .., "draft": .., "context": ..}, the first two {"rows": [..], "seconds": [..]}; '
            "`vllm-adaptive-tree costs` writes one, and so does an engine with a cost_profile"
        ) from error


def project(
    hardware: Hardware, cells: Sequence[Cell], configs: Sequence[Config], rows: Sequence[Row]
) -> list[Projected]:
    """Project steady loads; prefill and attention to long contexts are not counted."""
    by_name = {config.name: config for config in configs}
    found = []
    for cell in cells:
        for row in rows:
            if row.cell == cell.name:
                levels = _levels(by_name[row.config], row)
                seconds = hardware.seconds(cell.concurrency, row.nodes_per_step, levels)
                speed = cell.concurrency * row.tokens_per_step / seconds
                plain = cell.concurrency / hardware.seconds(cell.concurrency, 0.0, 0.0)
                found.append(Projected(cell.name, row.config, speed, speed / plain))
    return found


def _levels(config: Config, row: Row) -> float:
    """Draft levels of a step. A chain has one per token; a tree at most one per depth, fewer if few steps reach it."""
    if config.role == "chain":
        return row.nodes_per_step
    return sum(min(1.0, nodes) for nodes in row.nodes_by_depth.values())
