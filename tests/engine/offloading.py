"""vLLM's OffloadingConnector on a CPU: its scheduler, and copies of blocks in place of CUDA's.

vLLM's own `CPUOffloadingSpec` starts on accelerators alone.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

PREFILLED = "PREFILLED"
"""Before what a prefill instance prints."""


class CopyingWorker(OffloadingWorker):
    """A store reads its blocks when it is submitted, as late as vLLM submits it: one step after it was asked for."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int, blocks_per_chunk: int):
        assert blocks_per_chunk == 1
        self.caches = caches
        self.kept = [torch.zeros(chunks, cache.tensor.shape[1], dtype=torch.int8) for cache in caches.tensors]
        self.done: list[TransferResult] = []
        self.stored: dict[int, int] = {}
        """Block of each copy."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for own, kept, block, chunk in self._pairs(src_spec, dst_spec):
            kept[chunk] = own[block]
            self.stored[chunk] = block
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for own, kept, block, chunk in self._pairs(dst_spec, src_spec):
            own[block] = kept[chunk]
        return self._end(job_id)

    def _pairs(self, own: GPULoadStoreSpec, kept: Any) -> Iterator[tuple[Tensor, Tensor, int, int]]:
        """Cache and copy of each layer, block of the one and of the other."""
        assert isinstance(kept, BlockIDsLoadStoreSpec)
        ends = np.cumsum(own.group_sizes)
        for refs, end, size in zip(self.caches.group_data_refs, ends, own.group_sizes, strict=True):
            for index in range(end - size, end):
                for ref in refs:
                    tensor = self.caches.tensors[ref.tensor_idx].tensor
                    yield tensor, self.kept[ref.tensor_idx], int(own.block_ids[index]), int(kept.block_ids[index])

    def _end(self, job_id: int) -> bool:
        self.done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None: ...


class CopyingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self._worker: Any
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        worker: OffloadingWorker = self._worker
        return worker


class FailingConnector(ExampleConnector):
    """Brings nothing in every other load, and says so."""

    loads = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        lost = []
        for request in metadata.requests:
            if not request.is_store:
                self.loads += 1
                if self.loads % 2:
                    lost.append(request)
        self.lost = {block for request in lost for block in (request.slot_mapping // self._block_size).tolist()}
        metadata.requests = [request for request in metadata.requests if all(request is not one for one in lost)]
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.lost


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": "tests.engine.offloading",
        "cpu_bytes_to_use": 256 << 20,
        "offload_prompt_only": False,
    },
}
"""A `kv_transfer_config`."""
