"""Check G, informational: cost of a tree step relative to plain decoding. Only the budget decides by costs."""

from vllm_adaptive_tree.budget import Costs
from vllm_adaptive_tree.engine.self_check.verdict import Finding

BATCHES = (1, 8, 32)


def figures(costs: Costs, *, nodes: int, levels: int) -> Finding:
    """Tokens per request that a step with whole trees must bring to be worth its time, by batch size."""
    ratios = {}
    for requests in BATCHES:
        tree = costs.verify.cost(requests * (1 + nodes)) + levels * costs.draft.cost(requests)
        ratios[f"{requests} requests"] = round(tree / costs.verify.cost(requests), 2)
    return Finding("worth", True, ratios)
