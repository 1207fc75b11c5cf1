"""Flags of a request that decide how it is drafted and accepted, from its sampling parameters."""

from typing import Any

import numpy as np

from vllm_adaptive_tree.acceptance import TargetOnly
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.methods import Pair

GREEDY = 1e-5  # vLLM samples at higher temperatures only


def is_greedy(sampling: Any) -> bool:
    return bool(sampling.temperature < GREEDY)


def draws_from_target(sampling: Any, pair: Pair, options: TreeOptions) -> bool:
    """Return whether a request walks with the target's own draws, whatever the rule of the pair.

    Greedy requests do, those whose children the proposer chooses, and under `auto` those with a seed of their own.
    """
    return (
        pair.rule is TargetOnly
        or is_greedy(sampling)
        or pair.proposer.chooses(sampling.temperature)
        or (options.rejection_sample_method == "auto" and sampling.seed is not None)
    )


class RequestFlags:
    """Flags of many requests on the host: [requests] bool by vLLM's index of the request."""

    def __init__(self, requests: int, pair: Pair, options: TreeOptions):
        self.pair, self.options = pair, options
        self.greedy, self.from_target = (np.zeros(requests, dtype=bool) for _ in range(2))

    def add(self, request: int, sampling: Any) -> None:
        self.greedy[request] = is_greedy(sampling)
        self.from_target[request] = draws_from_target(sampling, self.pair, self.options)
