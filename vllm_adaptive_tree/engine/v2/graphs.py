"""The pieces of drafting that a CUDA graph holds: each runs over buffers that never move."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

T = TypeVar("T")


@dataclass(frozen=True)
class Piece(BatchExecutionDescriptor):
    """What the draft runs at once of so many requests, padding included."""

    levels: int = 0
    """Of the trees; 0: it reads the accepted tokens."""

    @classmethod
    def of(cls, requests: int, levels: int = 0) -> Self:
        return cls(CUDAGraphMode.FULL, num_tokens=requests, num_reqs=requests, levels=levels)


def ladder(most: int) -> list[int]:
    """Numbers of requests that graphs are made for: a batch is padded to the next."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


class DraftGraphs(CudaGraphManager):
    """vLLM's manager, which records where and how vLLM does and counts the memory; without one, everything runs as it
    is called.

    A piece is a function without arguments, and what it returns lies where the recording has left it until the same
    piece runs again.
    """

    def __init__(self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode):
        """`mode`: vLLM's of this engine; NONE: without graphs."""
        super().__init__(vllm_config, device, mode, decode_query_len=1)
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {}
        self.found: dict[BatchExecutionDescriptor, Any] = {}
        self.aside = False

    def run(self, piece: Piece, function: Callable[[], T]) -> T:
        if self.aside or piece not in self.graphs:
            return function()
        self.run_fullgraph(piece)
        found: T = self.found[piece]
        return found

    def record(self, functions: Mapping[Piece, Callable[[], Any]]) -> None:
        """On a device, in vLLM's order: the largest first, each after a run of its own."""
        if not self.cudagraph_mode:
            return
        self._capture_descs = {CUDAGraphMode.FULL: list(functions)}

        def prepared(piece: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            def run(mode: CUDAGraphMode) -> None:
                self.found[piece] = functions[piece]()

            return run

        self.capture(prepared, "Capturing the draft's CUDA graphs")

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside, pieces run as they are called, to be watched."""
        self.aside = True
        try:
            yield
        finally:
            self.aside = False
