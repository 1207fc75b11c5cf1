"""The measured acceptance under the costs of other hardware: what would be, not what was measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.results import Row
from vllm_adaptive_tree.budget import Curve


class Costs(NamedTuple):
    """Of one pair of models on one machine."""

    name: str  # says whether it was measured
    verify: Curve  # seconds of a target forward by its rows
    draft: Curve  # seconds of a draft level by its rows
    step: float  # seconds of a step outside both models

    def seconds(self, requests: int, nodes: float, levels: float) -> float:
        """Of a step of `requests` with `nodes` nodes each, drafted in `levels` levels."""
        draft = levels * self.draft.cost(requests * nodes / levels) if levels else 0.0
        return self.verify.cost(requests * (1 + nodes)) + draft + self.step


class Projected(NamedTuple):
    cell: str
    config: str
    tokens_per_second: float
    to_base: float


def read_costs(file: Path) -> Costs:
    """Raises ValueError where the file holds no costs."""
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        step = float(data["step"])
        if step < 0:
            raise ValueError('"step" is negative')
        return Costs(str(data["name"]), Curve.from_json(data["verify"]), Curve.from_json(data["draft"]), step)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"--project: {str(file)!r} holds no costs ({type(error).__name__}: {error}); it needs name, verify and "
            'draft (each {"rows": [..], "seconds": [..]}) and step (seconds); vllm_adaptive_tree/bench/curves has one'
        ) from error


def project(costs: Costs, cells: Sequence[Cell], configs: Sequence[Config], rows: Sequence[Row]) -> list[Projected]:
    """Steady loads only; prefills and the attention to long contexts cost nothing here."""
    by_name = {config.name: config for config in configs}
    found = []
    for cell in cells:
        for row in rows:
            if row.cell == cell.name:
                levels = _levels(by_name[row.config], row)
                seconds = costs.seconds(cell.concurrency, row.nodes_per_step, levels)
                speed = cell.concurrency * row.tokens_per_step / seconds
                plain = cell.concurrency / costs.seconds(cell.concurrency, 0.0, 0.0)
                found.append(Projected(cell.name, row.config, speed, speed / plain))
    return found


def _levels(config: Config, row: Row) -> float:
    """Draft levels of a step: a chain's are its tokens; a tree has no more than nodes at that depth, and none twice."""
    if config.role == "chain":
        return row.nodes_per_step
    return sum(min(1.0, nodes) for nodes in row.nodes_by_depth.values())
