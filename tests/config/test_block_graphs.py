"""Graphs of the block of a head of one forward on Model Runner V2."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_adaptive_tree.engine.v2.block_speculator import BlockForward


def test_a_block_is_whole_whatever_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each quota of nodes vLLM would record graphs, of a part of the block; the target's schedule stays."""
    seen = list[Any]()
    monkeypatch.setattr(
        DFlashSpeculator, "init_cudagraph_manager", lambda self, mode: seen.append((self.vllm_config, mode))
    )
    quotas = [(1, 40, 24), (41, 256, 6)]
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=quotas)
    given = SimpleNamespace(compilation_config=SimpleNamespace(), speculative_config=speculative)
    block: Any = object.__new__(BlockForward)
    block.__dict__.update(vllm_config=given, max_num_reqs=256, num_query_per_req=16)
    block.init_cudagraph_manager(CUDAGraphMode.FULL)
    ((config, mode),) = seen
    assert mode == CUDAGraphMode.FULL
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    assert config.compilation_config.max_cudagraph_capture_size == 256 * 16
    assert block.vllm_config is given
    assert speculative.num_speculative_tokens_per_batch_size == quotas
