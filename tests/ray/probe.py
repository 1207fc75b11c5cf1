"""Queries of a test to a rank: `worker_extension_cls="tests.ray.probe.Probe"`."""

import os
from typing import Any


class Probe:
    model_runner: Any

    def process(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def heads(self) -> tuple[int, int]:
        """Heads of a layer of the draft: those of this rank, and all."""
        modules = self.model_runner.drafter.model.modules()
        projection = next(module for module in modules if hasattr(module, "total_num_heads"))
        return projection.num_heads, projection.total_num_heads

    def costs(self) -> dict[str, Any] | None:
        budget = self.model_runner.budget
        return None if budget is None else budget.budget.costs.to_json()
