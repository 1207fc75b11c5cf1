"""What the host knows of requests, by vLLM's index of them."""

from typing import Any

import numpy as np

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.kinds import draws_from_target, has_grammar, is_greedy
from vllm_adaptive_tree.methods import Pair


class Kinds:
    def __init__(self, requests: int, pair: Pair, options: TreeOptions):
        self.pair, self.options = pair, options
        self.greedy, self.grammar, self.own = (np.zeros(requests, dtype=bool) for _ in range(3))
        """`own`: walks with the target's own draws, whatever the rule."""

    def add(self, request: int, sampling: Any) -> None:
        self.greedy[request] = is_greedy(sampling)
        self.grammar[request] = has_grammar(sampling)
        self.own[request] = draws_from_target(sampling, self.pair, self.options)
