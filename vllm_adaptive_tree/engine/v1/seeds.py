"""Seeds of requests for our own samples, and vLLM's generators of requests that have one."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Seeds:
    """Key of each request's samples: its own seed, or one that it gets in its first step and keeps."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.by_request: dict[str, int] = {}

    def of(self, requests: Sequence[Any]) -> Tensor:
        """Seeds [R] int64; `requests`: vLLM's states."""
        for request in requests:
            if request.req_id not in self.by_request:
                seed = request.sampling_params.seed
                self.by_request[request.req_id] = int(self.random.integers(1 << 62)) if seed is None else seed
        return torch.tensor([self.by_request[request.req_id] for request in requests])

    def forget(self, requests: Collection[str]) -> None:
        for request in requests:
            self.by_request.pop(request, None)


@contextmanager
def without_discarded(generators: dict[int, Any], discarded: np.ndarray) -> Iterator[None]:
    """Hide the generators, by row, of prompts that continue in the next step, `discarded` [rows] bool: their samples
    are dropped, and vLLM would rewind the generators by an offset, which a CPU's do not have."""
    hidden = {row: generators.pop(row) for row in list(generators) if discarded[row]}
    try:
        yield
    finally:
        generators.update(hidden)
