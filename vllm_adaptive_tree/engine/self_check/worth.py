"""G: what a tree step costs beside plain decoding. It informs, and decides nothing: that is the budget's."""

from vllm_adaptive_tree.budget import Costs
from vllm_adaptive_tree.engine.self_check.verdict import Finding

BATCHES = (1, 8, 32)


def figures(costs: Costs, *, nodes: int, levels: int) -> Finding:
    """By batch size: how many tokens a step with whole trees has to bring for each request to be worth its time."""
    found = {}
    for requests in BATCHES:
        tree = costs.verify.cost(requests * (1 + nodes)) + levels * costs.draft.cost(requests)
        found[f"{requests} requests"] = round(tree / costs.verify.cost(requests), 2)
    return Finding("worth", True, found)
