"""Pieces of drafting that a CUDA graph may hold: each runs over persistent buffers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

T = TypeVar("T")
MERGES, LOOKS_UP = -1, -2
"""Pieces that look up continuations: to merge them into drafted trees, or for the trees of a step at rest."""


@dataclass(frozen=True)
class Piece(BatchExecutionDescriptor):
    """Key of a piece: a unit of drafting for so many requests, padding included."""

    levels: int = 0
    """Levels of the trees; 0: the piece reads the accepted tokens; `MERGES`, `LOOKS_UP`."""

    @classmethod
    def of(cls, requests: int, levels: int = 0) -> Self:
        return cls(CUDAGraphMode.FULL, num_tokens=requests, num_reqs=requests, levels=levels)


def drop_whole_graphs(manager: CudaGraphManager) -> bool:
    """Let no step take a whole graph of this manager any more; return whether there was one."""
    dropped = False
    for size, graphs in manager._candidates.items():
        manager._candidates[size] = [graph for graph in graphs if graph.cg_mode != CUDAGraphMode.FULL]
        dropped |= len(graphs) > len(manager._candidates[size])
    return dropped


def of_plain_decodes(manager: CudaGraphManager) -> None:
    """Let this manager record its graphs again, the whole ones of decodes without drafts."""
    manager.release_graphs()
    manager._candidates.clear()
    manager._capture_descs.clear()
    manager.decode_query_len = 1
    manager._init_candidates()


def with_fullest(sizes: list[int], rows: int) -> list[int]:
    """Sizes of graphs, and that of the fullest batch of decodes, of so many `rows`: no whole graph is larger."""
    return sorted({*sizes, rows}) if sizes and sizes[-1] > rows else sizes


def ladder(most: int) -> list[int]:
    """Numbers of requests that graphs are made for: a batch is padded to the next."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


class DraftGraphs(CudaGraphManager):
    """Manager that records graphs where and how vLLM does, memory accounting included; without graphs, pieces run as
    they are called.

    A piece is a function without arguments; its result stays in the buffers of its recording until the same piece runs
    again.
    """

    def __init__(self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode):
        """`mode`: vLLM's of this engine; NONE: without graphs."""
        super().__init__(vllm_config, device, mode, decode_query_len=1)
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {}
        self.results: dict[BatchExecutionDescriptor, Any] = {}
        self.aside = False

    def run(self, piece: Piece, function: Callable[[], T]) -> T:
        if self.aside or piece not in self.graphs:
            return function()
        self.run_fullgraph(piece)
        result: T = self.results[piece]
        return result

    def record(self, functions: Mapping[Piece, Callable[[], Any]]) -> None:
        """Record the functions on a device in vLLM's order: the largest first, each after a run of its own."""
        if not self.cudagraph_mode:
            return
        self._capture_descs = {CUDAGraphMode.FULL: list(functions)}

        def prepared(piece: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            def run(mode: CUDAGraphMode) -> None:
                self.results[piece] = functions[piece]()

            return run

        self.capture(prepared, "Capturing the draft's CUDA graphs")

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Run pieces as they are called inside the block, to be watched."""
        self.aside = True
        try:
            yield
        finally:
            self.aside = False
