"""First steps of a mixed batch, before vLLM's watch for kernels that are compiled in service begins.

The check's own requests are greedy. The rule of the pair, its draws, and both together are compiled here, in the dtypes
and sizes of the engine.
"""

from typing import Any

import torch

from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.self_check.trial import Trial

PROMPT = 5
TEMPERATURES = {"warm-up, greedy": 0.0, "warm-up, sampled": 0.8}


@torch.inference_mode()
def warm_up(runner: Any) -> None:
    """Run steps of a greedy and a sampled request, or of one if there is no room for two: without trees, with all of
    their nodes, and, where a budget may cut them, with one node; where the draft may rest, it does for a step, and
    reads in the next what it has missed."""
    nodes, names = runner.options.num_speculative_tokens, list(TEMPERATURES)[-runner.max_num_reqs :]
    room = runner.max_num_tokens // len(names) - 1
    if min(nodes, room) < 1 or runner.max_model_len < PROMPT + 2 * nodes + 2:
        return
    further = runner.max_model_len >= PROMPT + 3 * nodes + 5
    cut, rests = further and runner.budget is not None, further and runner.speculator.may_rest
    more = 2 * nodes + 3 if further else nodes
    with Trial(runner) as trial:
        trial.begin({name: [0] * PROMPT for name in names}, more=more, temperatures=TEMPERATURES)
        trial.decode(names, nodes=min(nodes, room))
        if cut:
            trial.decode(names, nodes=min(nodes, room), most=1)
        if rests:
            with swapped(runner.speculator, "most_trees", 0):
                trial.decode(names)
            trial.decode(names)
