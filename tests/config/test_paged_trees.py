"""Trees inside a GPU backend: our kernel for requests with trees, the backend's for the others."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from tests.oracles.trees import on_device, random_tree
from tests.pure.test_tree_attention import DEVICE, INTERPRETED
from vllm_adaptive_tree.trees import TokenTree
from vllm_adaptive_tree.trees.masks import ancestor_mask

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 2, 64, 16


class Native(AttentionImpl[Any]):
    """A backend that writes 7 everywhere, and notes that it ran."""

    def __init__(self) -> None:
        self.head_size, self.scale, self.ran = HEAD_SIZE, HEAD_SIZE**-0.5, 0

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, metadata: Any, out: Tensor, *scales: Any
    ) -> Tensor:
        self.ran += 1
        self.metadata = metadata
        return out.fill_(7.0)


class Layer:
    layer_name = "layer"

    def __init__(self) -> None:
        self.impl: Any = Native()


@dataclass
class Metadata:
    """Fields of vLLM's metadata for every request."""

    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scheduler_metadata: Tensor | None = None


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "TestPaged"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


class TestPaged:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize("others", [0, 5])
    def test_verification(self, others: int) -> None:
        """A branched tree, a chain and an empty one, each behind its context; then `others` rows of the backend."""
        from vllm_adaptive_tree.engine.v2.attention import (
            KernelTrees,
            PagedTreeAttention,
            packed_bits,
            without_first,
        )

        torch.manual_seed(others)
        trees = [random_tree(7, 4, 0), TokenTree.chain([1, 2, 3]), TokenTree((), ())]
        parent = on_device(trees, 7).parent.to(DEVICE)
        counts, roots = [1 + len(tree) for tree in trees], [20, 3, 31]
        rows = sum(counts)
        cache = torch.randn(16, KV_HEADS, BLOCK, 2 * HEAD_SIZE, device=DEVICE)
        table = torch.arange(1, 13, dtype=torch.int32, device=DEVICE).view(4, 3)
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
        query, key, value = (
            torch.randn(rows + others, n, HEAD_SIZE, device=DEVICE) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        start = 0
        for request, (count, root) in enumerate(zip(counts, roots, strict=True)):  # as vLLM does before attention
            position = torch.arange(root, root + count, device=DEVICE)
            block = table[request].long()[position // BLOCK]
            cache[block, :, position % BLOCK] = torch.cat([key, value], -1)[start : start + count]
            start += count

        layer = Layer()
        PagedTreeAttention.adopt(layer)
        ends = torch.cat([starts, starts[-1:] + others])
        native = Metadata(table, ends, torch.tensor([*roots, 0], device=DEVICE) + ends.diff(), ends)
        context, bits = torch.tensor(roots, dtype=torch.int32, device=DEVICE), packed_bits(parent, starts, rows)
        rest = without_first(native, 3) if others else None
        step = KernelTrees(rest, table[:3], starts, context, bits, rows, None)
        out = torch.zeros_like(query)
        layer.impl.forward(layer, query, key, value, cache, step, out)
        assert layer.impl.ran == bool(others)
        if others:  # of the fourth request alone
            seen = layer.impl.metadata
            assert seen.query_start_loc.tolist() == [rows, rows + others]
            assert seen.seq_lens.tolist() == [others]
            assert torch.equal(seen.block_table, table[3:])
            assert seen.scheduler_metadata is None, "vLLM made it for all requests"
        assert (out[rows:] == 7).all()

        contexts = [part[table[:3].long()].flatten(1, 2).transpose(1, 2) for part in layer.impl.split(cache)]
        masks = ancestor_mask(parent)
        start = 0
        for request, (count, root) in enumerate(zip(counts, roots, strict=True)):
            own = slice(start, start + count)
            keys, values = (
                torch.cat([context[request, :, :root], new[own].transpose(0, 1)], 1).repeat_interleave(2, 0)
                for context, new in zip(contexts, (key, value), strict=True)
            )
            seen = torch.cat([masks.new_ones(count, root), masks[request, :count, :count]], 1)
            scores = torch.einsum("qhd,hkd->hqk", query[own], keys) * layer.impl.scale
            law = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            torch.testing.assert_close(out[own], torch.einsum("hqk,hkd->qhd", law, values), atol=1e-5, rtol=1e-4)
            start += count

    def test_the_backend_s_own(self) -> None:
        """Other metadata goes to the backend, and other layers of its class are not touched."""
        from vllm_adaptive_tree.engine.v2.attention import PagedTreeAttention

        layer, another = Layer(), Layer()
        PagedTreeAttention.adopt(layer)
        query = torch.zeros(3, HEADS, HEAD_SIZE, device=DEVICE)
        assert (layer.impl.forward(layer, query, None, None, None, Metadata(query, query, query), query) == 7).all()
        assert layer.impl.ran == 1
        assert not isinstance(another.impl, PagedTreeAttention)
