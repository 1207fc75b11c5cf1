"""Check A: tree attention kernel, in the shapes of a layer, against the reference in float64.

The yardstick is the error of PyTorch's own attention in the same dtype on the causal rows of the same batch; on CUDA
that is FlashAttention. Queries and K/V of 8 bits are widened for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from vllm_adaptive_tree.attention import reference, triton_tree
from vllm_adaptive_tree.engine.common.attention import AttentionVariant
from vllm_adaptive_tree.engine.self_check.trees import random_parents
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.targets.latents import is_latent
from vllm_adaptive_tree.engine.v2.attention import LayerShape
from vllm_adaptive_tree.engine.v2.latent import latent_views
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.masks import WORD, ancestor_bits
from vllm_adaptive_tree.trees.orders import depth_first, permuted

PLAIN = AttentionVariant()
WINDOW = 2048
"""Longest window that is checked: a window need only begin inside a context."""
TIMES = 2.0
"""Allowed error of the kernel, in errors of the yardstick."""
ROUNDINGS = 2.0
"""Allowed error in roundings of the largest value; the larger of the two counts."""
SHARE = 2.0**-6
"""Most error in shares of the largest value, whatever the yardstick."""


class Batch(NamedTuple):
    """Rows of several requests over a paged cache: `reference.tree_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    row_start: Tensor
    context: Tensor
    ancestors: Tensor
    scale: float
    variant: AttentionVariant
    scales: triton_tree.Scales | None
    dtype: torch.dtype  # of the result

    def widened(self, dtype: torch.dtype) -> "Batch":
        """The same in `dtype`, over a copy of the blocks in use: the cache itself may be as large as the device."""
        used, table = self.block_table.unique(return_inverse=True)
        wide = [part.double() for part in (self.query, self.key_cache[used.long()], self.value_cache[used.long()])]
        if self.scales is not None:
            heads = self.key_cache.shape[2]
            query, key, value = (scale.double().expand(heads) for scale in self.scales)
            if self.query.dtype.itemsize == 1:
                wide[0] *= query.repeat_interleave(self.query.shape[1] // heads)[:, None]
            wide[1:] = wide[1] * key[:, None], wide[2] * value[:, None]
        query, key, value = (part.to(dtype) for part in wide)
        return self._replace(
            query=query, key_cache=key, value_cache=value, block_table=table.int(), scales=None, dtype=dtype
        )

    def exact(self) -> Tensor:
        """Exact result, in float64."""
        wide = self.widened(torch.float64)
        return reference.tree_attention(*wide[:8], wide.zeros(), **self.variant._asdict())

    def zeros(self) -> Tensor:
        """For a result: values may be shorter than queries and keys."""
        return self.query.new_zeros(*self.query.shape[:2], self.value_cache.shape[3], dtype=self.dtype)

    def computed(self) -> Tensor:
        out = self.zeros()
        return triton_tree.tree_attention(*self[:8], out, scales=self.scales, **self.variant._asdict())


def check(
    layer: Any, *, block_size: int, nodes: int, longest: int, scale: float, variant: AttentionVariant = PLAIN
) -> Finding:
    """
    Args:
        layer: vLLM's attention layer, whose cache exists. On a GPU blocks at its end get noise, and are zeroed then.
        nodes: of the largest trees.
        longest: most tokens of a request.
        variant: of the layer. Its window is dropped if no request outgrows it, else raised to hold the largest tree,
            and cut to `WINDOW` tokens.
    """
    if variant.window:
        variant = variant._replace(
            window=0 if variant.window >= longest else min(max(variant.window, nodes + 1), WINDOW)
        )
    long = max(min(max(40 * block_size, variant.window + 2 * block_size), longest - 1 - nodes), 0)
    contexts = [0, block_size - 1, long, 1, block_size, 3 * block_size + 5]
    contexts = [min(context, long) for context in contexts]
    trees = [*(random_parents(count, seed=count) for count in (nodes, max(nodes // 2, 1))), list(range(-1, nodes - 1))]
    parents: list[list[int] | None] = [*trees, None, [], random_parents(nodes, seed=0)]
    error = yardstick = control = peak = 0.0
    with _Noise(layer, block_size, sum(-(-(context + 1 + nodes) // block_size) for context in contexts)) as noise:
        for first, last in ((0, len(contexts)), (2, 3)):  # all of them; the longest alone, which is split
            for ordered in (False, True):
                given = contexts[first:last], parents[first:last], scale, variant
                batch = noise.batch(*given, depth_first_order=ordered)
                exact = batch.exact()
                peak = max(peak, float(exact.abs().max()))
                error = max(error, _distance(batch.computed(), exact))
                yardstick = max(yardstick, _causal_error(batch.widened(batch.dtype)))
                flipped = batch.ancestors.clone()
                flipped[nodes, 0] ^= 1  # the last row of the first request no longer sees its root
                control = max(control, _distance(batch._replace(ancestors=flipped).computed(), exact))
    eps = torch.finfo(noise.dtype).eps
    allowed = min(max(TIMES * yardstick, ROUNDINGS * eps * peak), SHARE * peak)
    figures = {"error": error, "allowed": allowed, "PyTorch's": yardstick, "one bit flipped": control}
    return Finding("attention", error <= allowed < control, figures)


def _distance(computed: Tensor, exact: Tensor) -> float:
    """Largest difference; NaN counts as infinitely far."""
    return float((computed.double() - exact).abs().nan_to_num(torch.inf).max())


def _causal_error(batch: Batch) -> float:
    """Error of PyTorch's attention, if the rows of every request are a chain."""
    counts = batch.row_start.diff().tolist()
    chains = [_bits(list(range(-1, count - 2)), batch.ancestors.shape[1]) for count in counts if count]
    exact = batch._replace(ancestors=torch.cat(chains).to(batch.query.device), variant=PLAIN).exact()
    worst, start = 0.0, 0
    for request, count in enumerate(counts):
        rows, start = slice(start, start + count), start + count
        if count:
            length = int(batch.context[request]) + count
            blocks = batch.block_table[request].long()
            caches = (batch.key_cache, batch.value_cache)
            key, value = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in caches)
            mask: Any = causal_lower_right(count, length)
            attended = scaled_dot_product_attention(
                batch.query[rows].transpose(0, 1)[None],
                *(key, value),
                attn_mask=mask,
                scale=batch.scale,
                enable_gqa=key.shape[1] != batch.query.shape[1],
            )
            worst = max(worst, _distance(attended[0].transpose(0, 1), exact[rows]))
    return worst


class _Noise:
    """Blocks with random keys and values: the last ones of a layer's cache, or, where vLLM packs its cache for a CPU,
    blocks of our own in the layout of a GPU."""

    def __init__(self, layer: Any, block_size: int, blocks: int):
        self.cache = cache = layer.kv_cache
        self.device, self.blocks, self.block_size = cache.device, blocks, block_size
        self.heads, self.kv_heads = LayerShape.of(layer)[:2]
        self.size = layer.head_size
        self.random = torch.Generator(self.device).manual_seed(0)
        self.scales: triton_tree.Scales | None = None
        self.query_dtype = self.dtype = cache.dtype
        readable = hasattr(layer.impl, "views")
        if is_latent(layer):
            self.cache = cache if readable else torch.zeros(1 + blocks, block_size, self.size, dtype=self.dtype)
            self.key, self.value = latent_views(self.cache, layer)
            self.random_parts: tuple[Tensor, ...] = (self.cache[:, :, None],)  # all heads have one key
        else:
            if readable:
                self.key, self.value, self.scales = layer.impl.views(layer, cache)
            else:
                self.cache = torch.zeros(1 + blocks, self.kv_heads, block_size, 2 * self.size, dtype=self.dtype)
                self.key, self.value = self.cache.transpose(1, 2).split(self.size, dim=-1)
            self.random_parts = self.key, self.value
        if self.scales is not None:
            self.dtype = layer.dtype
            self.query_dtype = self.dtype if layer.query_quant is None else self.key.dtype

    def __enter__(self) -> "_Noise":
        factors: Sequence[Tensor | float] = (1.0, 1.0) if self.scales is None else self.scales[1:]
        for part, factor in zip(self.random_parts, factors, strict=False):
            part[-self.blocks :] = self.normal(*part[-self.blocks :].shape, dtype=part.dtype, factor=factor)
        return self

    def __exit__(self, *_: object) -> None:
        self.cache[-self.blocks :] = 0

    def normal(self, *shape: int, dtype: torch.dtype, factor: Tensor | float) -> Tensor:
        """Noise [.., heads, D] of deviation 1, once it is multiplied by `factor`, 1 or one for each of the heads."""
        factor = torch.as_tensor(factor, device=self.device).reshape(-1, 1)
        noise = torch.randn(shape, generator=self.random, device=self.device) / factor
        return noise.clamp(*(torch.finfo(dtype).min, torch.finfo(dtype).max)).to(dtype)

    def batch(
        self,
        contexts: list[int],
        parents: Sequence[list[int] | None],
        scale: float,
        variant: AttentionVariant,
        *,
        depth_first_order: bool,
    ) -> Batch:
        """Batch of trees. `parents`: of each tree; None: a request without rows."""
        counts = [0 if parent is None else 1 + len(parent) for parent in parents]
        width = -(-max(context + count for context, count in zip(contexts, counts, strict=True)) // self.block_size)
        table = torch.zeros(len(contexts), width, dtype=torch.int32)
        end, rows, words = len(self.cache), list[Tensor](), -(-max(counts) // WORD)
        for request, (context, count, parent) in enumerate(zip(contexts, counts, parents, strict=True)):
            used = -(-(context + count) // self.block_size)
            table[request, :used] = torch.arange(end - used, end).flip(0)
            end -= used
            if parent is not None:
                rows.append(_bits(parent, words, depth_first_order=depth_first_order))
        bits = torch.cat(rows)
        start = torch.tensor([0, *counts]).cumsum(0).int()
        factor: Tensor | float = 1.0
        if self.scales is not None and self.query_dtype != self.dtype:
            factor = self.scales.query.expand(self.kv_heads).repeat_interleave(self.heads // self.kv_heads)
        return Batch(
            self.normal(sum(counts), self.heads, self.size, dtype=self.query_dtype, factor=factor),
            *(self.key, self.value, table.to(self.device), start.to(self.device)),
            torch.tensor(contexts, dtype=torch.int32, device=self.device),
            bits.to(self.device),
            *(scale, variant, self.scales, self.dtype),
        )


def _bits(parent: list[int], words: int, *, depth_first_order: bool = False) -> Tensor:
    """Ancestor bits [1 + N, words]."""
    parents = torch.tensor([parent], dtype=torch.int64)
    if depth_first_order and parent:
        parents = permuted(TreeBatch(parents, parents, parents, parents.float()), depth_first(parents)).parent
    bits = ancestor_bits(parents)[0]
    return pad(bits, (0, words - bits.shape[1]))
