"""Tree attention on a GPU: is it right, how far is it from the memory's speed and from causal kernels?

    python -m benchmarks.gpu.attention --out benchmarks/results/gpu/attention.json

`cases`: 64 nodes over 8,192 tokens, batch 1 and 16, bfloat16, heads of a Llama-3 8B: the kernel (by how many programs
it fills), and with the contexts left to PyTorch's FlashAttention and merged by log-sum-exp; FlashAttention with a
causal mask, FlexAttention and xformers (where installed, in its split form) with the tree's. All but the kernel read
K/V laid side by side. The floor is the bytes of K/V over the bandwidth of a copy. `skipping`: large random trees as
inserted and depth first, the share of the own tiles that is read, and the time, FlexAttention's and xformers' as well.
All in a CUDA graph that walks over several layers' caches, more than the L2 cache holds, as decoding does. Errors are
the largest against `attention.reference` in float64.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.gpu.timing import copy_bandwidth, microseconds
from vllm_adaptive_tree.attention import reference
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.masks import WORD, ancestor_bits
from vllm_adaptive_tree.trees.orders import depth_first, mask_blocks, permuted

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
NODES, CONTEXT, BATCHES = 64, 8192, (1, 16)
FILLINGS = (0.25, 0.5, 1, 2, 4)
"""Programs that split contexts, for each multiprocessor."""
LARGE, LARGE_CONTEXT = (256, 512, 1024, 2048), 1024
LAYERS = 8
SCALE = HEAD_SIZE**-0.5


class Batch(NamedTuple):
    """Trees with a root each over contexts of one length; one cache per layer."""

    query: Tensor  # [rows, H, D]
    caches: list[Tensor]  # LAYERS times [blocks, Hkv, block_size, 2 * D], as vLLM's
    block_table: Tensor
    row_start: Tensor
    context: Tensor
    bits: Tensor  # [R, 1 + N, W]

    @classmethod
    def of(cls, parent: Tensor, length: int) -> "Batch":
        requests, rows = parent.shape[0], 1 + parent.shape[1]
        blocks = -(-(length + rows) // BLOCK_SIZE)
        shape = (requests * blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        device = parent.device
        return cls(
            torch.randn(requests * rows, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device),
            [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)],
            torch.randperm(requests * blocks, device=device).int().view(requests, blocks),
            torch.arange(requests + 1, dtype=torch.int32, device=device) * rows,
            torch.full((requests,), length, dtype=torch.int32, device=device),
            ancestor_bits(parent),
        )

    def arguments(self, layer: int) -> tuple[Any, ...]:
        key, value = self.caches[layer].transpose(1, 2).split(HEAD_SIZE, dim=-1)
        bits = self.bits.flatten(0, 1)
        return (self.query, key, value, self.block_table, self.row_start, self.context, bits, SCALE)

    def dense(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [R, H, rows, D], key and value [R, Hkv, length + rows, D] side by side."""
        requests, rows = self.bits.shape[:2]
        cache = self.caches[layer][self.block_table.long()].transpose(2, 3).flatten(1, 2)  # [R, L, Hkv, 2 * D]
        cache = cache[:, : self.length].transpose(1, 2)
        key, value = (part.contiguous() for part in cache.split(HEAD_SIZE, dim=-1))
        return self.query.view(requests, rows, HEADS, HEAD_SIZE).transpose(1, 2).contiguous(), key, value

    @property
    def length(self) -> int:
        return int(self.context[0]) + self.bits.shape[1]

    @property
    def bytes(self) -> int:
        """Of the keys and values that one layer has to read."""
        return self.bits.shape[0] * self.length * KV_HEADS * 2 * HEAD_SIZE * 2


def random_trees(requests: int, nodes: int) -> Tensor:
    """The parent of every node uniform among the earlier ones and the root: [R, N]."""
    uniform = torch.rand(requests, nodes, generator=torch.Generator().manual_seed(0))
    return ((uniform * torch.arange(1, nodes + 1)).long() - 1).cuda()


def kernel_calls(batch: Batch, filling: float = 1) -> list[Callable[[], object]]:
    """One plan for all layers, made beforehand, as in a step; `filling`: so many times the device's processors."""
    from vllm_adaptive_tree.attention.triton_tree import AttentionPlan, tree_attention

    out, device = torch.empty_like(batch.query), batch.query.device
    processors = round(filling * torch.cuda.get_device_properties(device).multi_processor_count)
    shape = len(out), len(batch.context), HEADS, KV_HEADS, HEAD_SIZE
    plan = AttentionPlan(*shape, out.dtype, device, processors=processors).update(batch.row_start, batch.context)
    return [partial(tree_attention, *batch.arguments(layer), out, plan=plan) for layer in range(LAYERS)]


def error(batch: Batch, found: Tensor) -> float:
    query, key, value, *rest = batch.arguments(0)
    key, value = key.double(), value.double()
    expected = reference.tree_attention(query.double(), key, value, *rest, torch.empty_like(query.double()))
    return (found.double() - expected).abs().max().item()


def flash_calls(batch: Batch) -> list[Callable[[], object]]:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    mask = causal_lower_right(batch.bits.shape[1], batch.length)
    call = partial(scaled_dot_product_attention, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return [partial(call, *batch.dense(layer)) for layer in range(LAYERS)]


def flex_calls(batch: Batch) -> list[Callable[[], object]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, length = batch.bits.shape[1], batch.length - batch.bits.shape[1]
    row = torch.arange(rows, device="cuda")
    seen = (batch.bits[:, :, row // WORD] >> row % WORD & 1).bool()  # [R, rows, rows]

    def visible(request: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < length) | seen[request, query, (key - length).clamp(min=0)]

    blocks = create_block_mask(visible, batch.bits.shape[0], None, rows, batch.length, device="cuda")
    call = partial(torch.compile(flex_attention), block_mask=blocks, scale=SCALE, enable_gqa=True)
    return [partial(call, *batch.dense(layer)) for layer in range(LAYERS)]


def merged_calls(batch: Batch) -> list[Callable[[], object]]:
    """FlashAttention over the contexts alone, the kernel over the trees' own rows."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    from vllm_adaptive_tree.attention.triton_tree import tree_attention

    requests, rows = batch.bits.shape[:2]
    length = batch.length - rows
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * length
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = torch.empty_like(batch.query)

    def call(layer: int, key: Tensor, value: Tensor) -> Tensor:
        context_result = varlen_attn(
            *(batch.query, key, value, batch.row_start, starts, rows, length),
            return_aux=AuxRequest(lse=True),
            scale=SCALE,
            **grouped,
        )
        return tree_attention(*batch.arguments(layer), out, context_result=context_result)

    calls: list[Callable[[], object]] = []
    for layer in range(LAYERS):
        contexts = (part[:, :, :length].transpose(1, 2).flatten(0, 1) for part in batch.dense(layer)[1:])
        calls.append(partial(call, layer, *(part.contiguous() for part in contexts)))
    return calls


def xformers_calls(batch: Batch) -> list[Callable[[], object]]:
    """In its own form for trees: the contexts, the trees with a bias for each request, both merged by log-sum-exp.

    `xformers.ops.tree_attention` is the same with one tree for all requests.
    """
    from xformers.ops import fmha
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask

    requests, rows = batch.bits.shape[:2]
    length, group = batch.length - rows, HEADS // KV_HEADS
    row = torch.arange(rows, device="cuda")
    seen = (batch.bits[:, :, row // WORD] >> row % WORD & 1).bool()  # [R, rows, rows]
    padded = -(-rows // 8) * 8  # the alignment of a bias
    bias = torch.full((requests, 1, 1, rows, padded), -torch.inf, dtype=torch.bfloat16, device="cuda")
    bias[..., :rows].masked_fill_(seen[:, None, None], 0)
    bias = bias.expand(-1, KV_HEADS, group, -1, -1)[..., :rows]
    prefix = BlockDiagonalPaddedKeysMask.from_seqlens([rows] * requests, length, [length] * requests)

    def call(query: Tensor, contexts: list[Tensor], own: list[Tensor]) -> Tensor:
        flat = [part.flatten(0, 1)[None] for part in (query, *contexts)]
        before, log = fmha.memory_efficient_attention_partial(*flat, attn_bias=prefix, scale=SCALE)
        log = log.reshape(KV_HEADS, group, requests, rows).permute(2, 0, 1, 3)
        after = fmha.memory_efficient_attention_partial(
            query, *own, attn_bias=bias, scale=SCALE, op=fmha.triton_splitk.FwOp
        )
        parts = [before.view_as(query), after[0]], [log, after[1]]
        merged: Tensor = fmha.merge_attentions(*parts, write_lse=False, output_dtype=query.dtype)[0]
        return merged.flatten(2, 3).flatten(0, 1)

    calls: list[Callable[[], object]] = []
    for layer in range(LAYERS):
        query, *keys = (part.transpose(1, 2) for part in batch.dense(layer))  # [R, rows or length, heads, D]
        halves = [(part[:, :length].contiguous(), part[:, length:].contiguous()) for part in keys]
        shared = [[half[:, :, :, None].expand(-1, -1, -1, group, -1) for half in part] for part in halves]
        contexts, own = zip(*shared, strict=True)
        calls.append(partial(call, query.unflatten(2, (KV_HEADS, group)).contiguous(), list(contexts), list(own)))
    return calls


def flashinfer_calls(batch: Batch) -> list[Callable[[], object]]:
    """Its prefill over the paged cache, with the mask of context and tree; planned on the host, outside the time."""
    import flashinfer

    requests, rows = batch.bits.shape[:2]
    blocks, row = batch.block_table.shape[1], torch.arange(rows, device="cuda")
    seen = torch.ones(requests, rows, batch.length, dtype=torch.bool, device="cuda")
    seen[:, :, batch.length - rows :] = (batch.bits[:, :, row // WORD] >> row % WORD & 1).bool()
    pages = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * blocks
    last = torch.full((requests,), batch.length - (blocks - 1) * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        *(batch.row_start, pages, batch.block_table.flatten(), last, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE),
        custom_mask=seen.flatten(),
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
    )
    caches = [tuple(part.contiguous() for part in cache.split(HEAD_SIZE, dim=-1)) for cache in batch.caches]
    return [partial(wrapper.run, batch.query, cache) for cache in caches]


def others(batch: Batch) -> dict[str, float | None]:
    """Kernels with the tree's mask that are not ours, FlashInfer's over the paged cache as well; None where it is not
    installed or refuses."""
    guests = {"flex": ("torch", flex_calls), "xformers": ("xformers", xformers_calls)}
    guests |= {"flashinfer": ("flashinfer", flashinfer_calls)}
    found: dict[str, float | None] = dict.fromkeys(guests)
    for name, (module, calls) in guests.items():
        if importlib.util.find_spec(module):
            try:
                found[name] = microseconds(calls(batch))
            except Exception as error:
                print(f"{name}: {error}", file=sys.stderr)
    return found


def measured_case(requests: int, bandwidth: float) -> dict[str, Any]:
    batch = Batch.of(random_trees(requests, NODES), CONTEXT)
    calls = kernel_calls(batch)
    return {
        "requests": requests,
        "error": error(batch, cast(Tensor, calls[0]())),
        "floor": batch.bytes / bandwidth,
        "kernel": microseconds(calls),
        "kernel_by_filling": {filling: microseconds(kernel_calls(batch, filling)) for filling in FILLINGS},
        "kernel_and_flash": microseconds(merged := merged_calls(batch)),
        "kernel_and_flash_error": error(batch, cast(Tensor, merged[0]())),
        "flash_causal": microseconds(flash_calls(batch)),
        **others(batch),
    }


def measured_skipping(nodes: int) -> dict[str, Any]:
    parent = random_trees(1, nodes)
    tree = TreeBatch(torch.arange(nodes, device="cuda")[None], parent, parent, parent.float())
    ordered = permuted(tree, depth_first(parent)).parent
    slots = torch.arange(nodes, device="cuda")[None]
    case: dict[str, Any] = {"nodes": nodes}
    for name, parents in (("inserted", parent), ("depth_first", ordered)):
        batch = Batch.of(parents, LARGE_CONTEXT)
        calls = kernel_calls(batch)
        filled = mask_blocks(parents, slots, block=32).item() / (-(-nodes // 32)) ** 2
        case[name] = {
            "us": microseconds(calls),
            "filled_32": filled,
            "error": error(batch, cast(Tensor, calls[0]())),
            **others(batch),
        }
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu/attention.json"))
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("benchmarks.gpu.attention needs a CUDA device, and PyTorch sees none here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bandwidth_gb_s": bandwidth / 1e3,
        "unit": "microseconds per layer",
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "nodes": NODES, "context": CONTEXT},
        "cases": [measured_case(requests, bandwidth) for requests in BATCHES],
        "skipping_context": LARGE_CONTEXT,
        "skipping": [measured_skipping(nodes) for nodes in LARGE],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save(out, results)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
