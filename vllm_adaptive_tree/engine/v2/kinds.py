from typing import Any

import numpy as np


class Kinds:
    """What the host knows of requests, by vLLM's index of them."""

    def __init__(self, requests: int):
        self.greedy = np.zeros(requests, dtype=bool)
        self.structured = np.zeros(requests, dtype=bool)
        """Their output follows a grammar, which vLLM lets read draft tokens in a row only."""

    def add(self, request: int, sampling: Any) -> None:
        self.greedy[request] = sampling.temperature == 0
        self.structured[request] = sampling.structured_outputs is not None
