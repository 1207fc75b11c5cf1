"""The estimate of a tree's buffers, beside what the adapter for GPUs allocates: its own code, on CPU tensors.

Models are made up and small; the formulas know no others.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gain import Moved
from memory import FULL, LANES, PROCESSORS, Load, TreeBuffers
from model import Model, Shard
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.examples.allocated import Allocated
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.request_flags import RequestFlags
from vllm_adaptive_tree.engine.v2.attention import KernelTrees, PagedTreeAttention
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.engine.v2.speculator import ModelSpeculator
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels.layout import Layout
from vllm_adaptive_tree.kernels.reading import DraftInputs
from vllm_adaptive_tree.methods import resolve

BLOCK = 16


def model(**changes: int) -> Model:
    sizes = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "head_size": 16, "intermediate": 128}
    return Model(**{**sizes, "vocabulary": 4096, **changes}, tied=True)


class Gathered(PagedTreeAttention):
    """Without kernels a draft's levels read the cache as a CPU's do, in the layout of a GPU."""

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (part[block_table.long()].flatten(1, 2).transpose(1, 2).float() for part in self.split(kv_cache))
        return key, value


class Layer:
    """An attention layer of one rank behind our implementation for GPUs, with a cache of its own."""

    def __init__(self, name: str, shard: Shard, blocks: int):
        self.layer_name, size = name, shard.model.head_size
        self.impl: Any = object.__new__(Gathered)
        self.impl.head_size, self.impl.scale = size, size**-0.5
        self.kv_cache = torch.zeros(blocks, shard.kv_heads, BLOCK, 2 * size, dtype=torch.bfloat16)


class Speculator(ModelSpeculator):
    """The drafting itself is `ModelSpeculator`'s; the draft is its attention and random logits."""

    def __init__(self, shard: Shard, load: Load, method: str = "adaptive_tree"):
        spec = {"method": method, "model": "draft", "num_speculative_tokens": load.nodes}
        whole = {"threshold": 0} if method == "opt_tree" else {}
        self.options, _ = TreeOptions.parse({**spec, "tree": {**whole, "max_depth": load.depth}})
        self.pair = resolve(self.options)
        self.shard, self.load = shard, load
        self.flags, self.budget = RequestFlags(load.requests, self.pair, self.options), None
        self.steering = SimpleNamespace(steered=SimpleNamespace(fill=False, temperature=False))
        self.readback, self.device = AsyncReadback(), torch.device("cpu")
        self.follows_request, self.fixed_temperature, self.forwards, self.lookup, self.offers = True, 1.0, 0, None, None
        self.levels = self.drafted_levels = min(load.depth, load.nodes)
        self.num_speculative_steps, self.max_model_len = load.nodes, load.context
        self.draft_model_config = SimpleNamespace(max_model_len=load.context)
        self.most_rows = 1 << 30
        self.drafts = Drafts(load.requests, load.requests, load.nodes, shard.model.vocabulary, self.device)
        self.inputs = DraftInputs.empty(load.requests, 0, self.device)
        self.captures, self.most_trees, self.everyone = False, load.requests, torch.ones(load.requests)
        self.graphs: Any = SimpleNamespace(run=lambda _, function: function())
        pages = -(-(1 + load.context) // BLOCK)
        self.block_tables = SimpleNamespace(
            input_block_tables=[torch.arange(load.requests * pages).view(load.requests, pages)]
        )
        cache = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK), layer_names=["0"])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[cache])
        self.layers = [Layer(str(i), shard, load.requests * pages) for i in range(shard.model.layers)]
        self.draft_tokens = torch.zeros(load.requests, 1, dtype=torch.int64)
        self.draft_attn_layer_names = {layer.layer_name for layer in self.layers}

    def _run_model(self, tokens: Tensor, positions: Tensor, metadata: Any, *rest: Any) -> Tensor:
        rows, size = len(tokens), self.shard.model.head_size
        for layer in self.layers:
            query = torch.randn(rows, self.shard.heads, size, dtype=torch.bfloat16)
            key, value = torch.randn(2, rows, self.shard.kv_heads, size, dtype=torch.bfloat16)
            attention = metadata[layer.layer_name]
            layer.impl.forward(layer, query, key, value, layer.kv_cache, attention, torch.empty_like(query))
        return torch.randn(rows, self.shard.model.hidden, dtype=torch.bfloat16)

    def compute_draft_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Flat enough for trees that are as deep and as wide as they may be."""
        return torch.randn(len(hidden), self.shard.model.vocabulary, dtype=torch.bfloat16)

    def sample_and_grow(self) -> Any:
        requests = self.load.requests
        self.sample_draft(torch.randn(requests, self.shard.model.hidden, dtype=torch.bfloat16))
        self.inputs.alive.fill_(1)
        self.inputs.temperature.fill_(1)
        self.inputs.position.fill_(self.load.context - 1 - self.load.depth)
        self.longest_text = self.load.context
        return self.grown_trees(requests, 1 << 30).tree


CASES = {
    "contexts": (model(), Load(requests=3, context=500, nodes=12, depth=4)),
    "a vocabulary": (model(vocabulary=32_768, layers=1), Load(requests=4, context=40, nodes=20, depth=3)),
    "deep trees": (model(vocabulary=2048), Load(requests=2, context=200, nodes=40, depth=10)),
    "scores": (model(layers=1, vocabulary=128), Load(requests=2, context=1000, nodes=60, depth=3)),
    "as many K/V heads as heads": (model(kv_heads=8, layers=2), Load(requests=2, context=400, nodes=16, depth=4)),
}


def drafted(case: str, method: str) -> tuple[Shard, Load, Allocated]:
    shape, load = CASES[case]
    speculator = Speculator(Shard(shape, 1), load, method)
    # The mask rules a GPU's flash attention out, float32 with shared K/V heads its memory-efficient one.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Allocated() as allocated:
        tree = speculator.sample_and_grow()
    assert speculator.forwards == load.depth - 1
    assert tree.tokens.shape == (load.requests, load.nodes)
    return speculator.shard, load, allocated


@pytest.mark.parametrize("case", CASES)
def test_drafting_takes_what_the_estimate_says(case: str) -> None:
    """No more, and not so much less that the figure would mean nothing."""
    shard, load, allocated = drafted(case, "adaptive_tree")
    bound = TreeBuffers.of(shard, shard, load)
    assert allocated.peak <= bound.drafting + bound.kept
    assert allocated.peak >= 0.6 * (bound.drafting + bound.kept)


@pytest.mark.parametrize("case", CASES)
def test_drafting_moves_what_the_projection_says(case: str) -> None:
    """The projection, of OPT-Tree, leaves out what is small: masks, and trees while they grow."""
    shard, load, allocated = drafted(case, "opt_tree")
    moved = Moved.of(shard, load).in_step(load.depth - 1)
    assert 0.8 < allocated.moved / moved < 1.25


def test_a_verification_keeps_nothing_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.attention import triton_tree

    shape, load = CASES["contexts"]
    shard = Shard(shape, 1)
    monkeypatch.setattr(triton_tree, "tree_attention", lambda *given, **_: given[-1])
    tree = Speculator(shard, load).sample_and_grow()
    per_request = 1 + load.nodes
    first = torch.arange(load.requests) * per_request
    scheduled = np.full(load.requests, load.nodes, dtype=np.int32)
    step = Verification(tree, Any, first, torch.full_like(first, load.context), scheduled, None, 0, 0)  # type: ignore[arg-type]
    pages = torch.zeros(load.requests, load.padded // BLOCK, dtype=torch.int32)
    row_start = (torch.arange(1 + load.requests) * per_request).int()
    layers = [Layer(str(i), shard, 1) for i in range(shape.layers)]
    layout = Layout.empty(load.requests, load.rows, load.nodes, torch.device("cpu"))
    with torch.no_grad(), Allocated() as allocated:
        step.write_mask(layout, row_start, load.requests, load.rows)
        trees = KernelTrees(None, pages, row_start, layout.context, layout.bits, load.rows, None)
        for layer in layers:
            query = torch.empty(load.rows, shard.heads, shape.head_size, dtype=torch.bfloat16)
            key, value = torch.empty(2, load.rows, shard.kv_heads, shape.head_size, dtype=torch.bfloat16)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, trees, query)
        del query, key, value
    assert trees.rows == load.rows
    assert allocated.held <= TreeBuffers.of(shard, shard, load).verified


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_partial_results_of_the_kernel_are_bounded(ranks: int) -> None:
    """On any GPU of this generation: an H100 has 132 multiprocessors, a B200 148."""
    from vllm_adaptive_tree.attention.plan import AttentionPlan

    heads, kv_heads, size = 64 // ranks, 8 // ranks, 128
    bound = PROCESSORS * LANES * (size + 1) * FULL
    seen = 0
    for requests in (1, 2, 3, 4, 8, 16, 64, 256):
        for nodes in (1, 7, 10, 31, 63, 255):
            shape = requests * (1 + nodes), requests, heads, kv_heads, size
            plan = AttentionPlan(*shape, torch.bfloat16, torch.device("meta"), processors=PROCESSORS)
            partial = plan.partial.nbytes + plan.weight.nbytes
            assert partial <= bound, (requests, nodes)
            seen = max(seen, partial)
    assert seen > bound / 2
