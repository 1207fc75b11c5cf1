"""First steps of a mixed batch, before vLLM's watch for kernels that are compiled in service begins.

The check's own requests are greedy. The rule of the pair, its draws, and both together are compiled here, in the dtypes
and sizes of the engine.
"""

from typing import Any

import torch

from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.v2.trial import Trial

PROMPT = 5
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8}
PENALTY = {"repetition_penalty": 1.1}
REQUESTS = {"warm-up, greedy": GREEDY, "warm-up, sampled": SAMPLED}
PENALISED = {"warm-up, greedy, penalised": GREEDY | PENALTY, "warm-up, sampled, penalised": SAMPLED | PENALTY}
UNPROCESSED = {"warm-up, greedy, as it is": GREEDY, "warm-up, sampled, as it is": {"temperature": 1.0}}
"""A batch whose logits nothing processes: they stay in the model's dtype."""


@torch.inference_mode()
def warm_up(runner: Any) -> None:
    """Run steps of a greedy and a sampled request, or of one if there is no room for two: without trees, with all of
    their nodes, and, where they may be cut, with one node; where the draft may rest, it does for a step, and
    reads in the next what it has missed. Then steps of such requests at temperature 1, and with penalties, and of a
    tree beside a prompt."""
    nodes, names = runner.options.num_speculative_tokens, list(REQUESTS)[-runner.max_num_reqs :]
    room = runner.max_num_tokens // len(names) - 1
    if min(nodes, room) < 1 or runner.max_model_len < PROMPT + 2 * nodes + 2:
        return
    longer = runner.max_model_len >= PROMPT + 3 * nodes + 5
    cut, rests = longer and runner.adaptive_verification is not None, longer and runner.speculator.may_rest
    more = 2 * nodes + 3 if longer else nodes
    with Trial(runner) as trial:
        trial.begin({name: [0] * PROMPT for name in names}, more=more, sampling=REQUESTS)
        trial.decode(names, nodes=min(nodes, room))
        if cut:
            trial.decode(names, nodes=min(nodes, room), most=1)
        if rests:
            with swapped(runner.speculator, "most_trees", 0):
                trial.decode(names)
            trial.decode(names)
        trial.finish(names)
        for further in (UNPROCESSED, PENALISED):
            others = list(further)[-runner.max_num_reqs :]
            trial.begin({name: [0] * PROMPT for name in others}, more=nodes, sampling=further)
            trial.decode(others, nodes=min(nodes, room))
            trial.finish(others)
        beside = min(nodes, runner.max_num_tokens - PROMPT - 1)
        if len(names) > 1 and beside > 0:
            trial.begin({names[0]: [0] * PROMPT}, more=nodes, sampling=REQUESTS)
            trial.decode_beside(names[0], nodes=beside, texts={names[1]: [0] * PROMPT})
            trial.finish(names)
