from collections.abc import Callable
from pathlib import Path

from vllm.logger import init_logger

from vllm_adaptive_tree.budget import Costs

LOWEST, HIGHEST = 0.05, 0.9
"""Of a measured threshold."""

logger = init_logger(f"vllm.{__name__}")


def threshold(ratio: float) -> float:
    """OPT-Tree's mu, from what a draft level costs in target forwards (arXiv 2406.17276)."""
    return min(max(ratio, LOWEST), HIGHEST)


def starting_costs(file: str | None, measure: Callable[[], Costs], *, rank: int) -> Costs:
    """What `budget: "auto"` begins with: from the file, or measured, and written there by rank 0 if one is named."""
    path = None if file is None else Path(file).expanduser()
    if path is not None and path.exists():
        costs, source = Costs.read(path), f"from {path}"
    else:
        costs, source = measure(), "measured"
        if path is not None and rank == 0:
            costs.write(path)
    logger.info("tree budget 'auto': %s, %s", source, costs)
    return costs
