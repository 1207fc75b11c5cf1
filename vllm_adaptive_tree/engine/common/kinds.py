"""What kind of request one is, read off its sampling parameters."""

from typing import Any

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.methods import Pair

GREEDY = 1e-5  # vLLM samples at higher temperatures only


def is_greedy(sampling: Any) -> bool:
    return bool(sampling.temperature < GREEDY)


def has_grammar(sampling: Any) -> bool:
    """Its output follows a grammar, which vLLM lets read draft tokens in a row only: no siblings."""
    return sampling.structured_outputs is not None


def draws_from_target(sampling: Any, pair: Pair, options: TreeOptions) -> bool:
    """Whether it walks with the target's own draws, whatever the rule of the pair.

    Greedy requests do, and those with a seed of their own under `auto`. So do those with a grammar: the scheduler cuts
    a drafted path where the grammar refuses it, and no rule can tell a child that was cut, with p = 0, from one that
    was never drawn.
    """
    return (
        pair.rule is RULES["target_only"]
        or is_greedy(sampling)
        or has_grammar(sampling)
        or (options.rejection_sample_method == "auto" and sampling.seed is not None)
    )
