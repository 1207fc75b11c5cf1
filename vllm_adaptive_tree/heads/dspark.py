"""One-forward head for Llama-like targets, as vLLM's `Qwen3DSparkForCausalLM` computes it.

The backbone is DFlash's: keys and values of the context are projections of the target's states, and a block of the root
and K masks is read in one forward; the row of mask j predicts the j-th token after the root. DSpark's Markov head adds
a low-rank bias by the token before. Without that bias the head is a DFlash head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_adaptive_tree.heads.eagle3 import MLP, Dimensions, Norm


class Block(NamedTuple):
    """Dimensions of a head in addition to those of its target."""

    layers: int = 2
    depth: int = 7  # K
    rank: int = 64  # of the bias
    mask: int = 0  # the mask token


class BlockAttention(nn.Module):
    """Attention in which queries of a block see the context before its root and the whole block."""

    def __init__(self, size: Dimensions):
        super().__init__()
        self.size = size
        queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.hidden, queries, bias=False)
        self.k_proj = nn.Linear(size.hidden, keys, bias=False)
        self.v_proj = nn.Linear(size.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, size.hidden, bias=False)
        self.q_norm = Norm(size.head_dim, size.eps)
        self.k_norm = Norm(size.head_dim, size.eps)

    def forward(self, x: Tensor, context: Tensor, roots: Tensor) -> Tensor:
        """x [B, P, S, H]: blocks at the positions `roots` [P] of texts with `context` [B, T, H]; the same shape."""
        size, (batch, places, rows, _), length = self.size, x.shape, context.shape[1]
        flat = x.flatten(1, 2)
        at = (roots[:, None] + torch.arange(rows, device=x.device)).flatten()
        every = torch.cat([context, flat], 1)  # keys of texts, then of blocks
        where = torch.cat([torch.arange(length, device=x.device), at])
        query = rotate(self.q_norm(self._split(self.q_proj(flat), size.heads)), at, size.rope_theta)
        key = rotate(self.k_norm(self._split(self.k_proj(every), size.kv_heads)), where, size.rope_theta)
        value = self._split(self.v_proj(every), size.kv_heads)
        groups = size.heads // size.kv_heads
        key, value = (one.to(x.dtype).repeat_interleave(groups, 1) for one in (key, value))
        query = query.to(x.dtype) * size.head_dim**-0.5
        own_key, own_value = (one[:, :, length:].unflatten(2, (places, rows)) for one in (key, value))
        before = (query @ key[:, :, :length].transpose(-1, -2)).float().unflatten(2, (places, rows))
        unseen = torch.arange(length, device=x.device) >= roots[:, None, None]  # [P, 1, T]
        within = (query.unflatten(2, (places, rows)) @ own_key.transpose(-1, -2)).float()
        weight = torch.cat([before.masked_fill(unseen, -1e9), within], -1).softmax(-1).to(value.dtype)
        out = weight[..., :length].flatten(2, 3) @ value[:, :, :length]
        out = out.unflatten(2, (places, rows)) + weight[..., length:] @ own_value
        return self.o_proj(out.permute(0, 2, 3, 1, 4).reshape(batch, places, rows, -1))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.size.head_dim)).transpose(1, 2)


class BlockLayer(nn.Module):
    def __init__(self, size: Dimensions):
        super().__init__()
        self.self_attn = BlockAttention(size)
        self.mlp = MLP(size)
        self.input_layernorm = Norm(size.hidden, size.eps)
        self.post_attention_layernorm = Norm(size.hidden, size.eps)

    def forward(self, x: Tensor, context: Tensor, roots: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, roots)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Bias [.., V or D] by the token before: W2 W1[token]."""

    def __init__(self, vocabulary: int, drafted: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(tokens))


class BlockHead(nn.Module):
    """One-forward head. Parameters have the names of vLLM's checkpoints; the embedding is the target's.
    `draft_vocabulary`: as in `eagle3.Head`."""

    def __init__(self, size: Dimensions, auxiliary: int, block: Block, draft_vocabulary: int | None = None):
        super().__init__()
        self.block = block
        self.fc = nn.Linear(auxiliary * size.hidden, size.hidden, bias=False)
        self.hidden_norm = Norm(size.hidden, size.eps)
        layers = [BlockLayer(size) for _ in range(block.layers)]
        for layer in layers:  # one for all: vLLM's own kernel for CPUs norms every layer's context by the first's
            layer.self_attn.k_norm = layers[0].self_attn.k_norm
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(size.hidden, size.eps)
        self.lm_head = None if draft_vocabulary is None else nn.Linear(size.hidden, draft_vocabulary, bias=False)
        self.markov_head = MarkovHead(size.vocabulary, draft_vocabulary or size.vocabulary, block.rank)

    def forward(self, auxiliary: Tensor, embedded: Tensor, roots: Tensor) -> Tensor:
        """Normed states, for the output matrix: row j - 1 predicts the j-th token after the root.

        Args:
            auxiliary: [B, T, A * H], row t: the target's states at token t.
            embedded: [B, P, 1 + K, H] of the roots' tokens and K masks.
            roots: [P] positions; a block reads the states before its root.

        Returns:
            [B, P, K, H]
        """
        context = self.hidden_norm(self.fc(auxiliary))
        for layer in self.layers:
            embedded = layer(embedded, context, roots)
        return self.norm(embedded[:, :, 1:])


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE of [B, heads, T, D] at `positions` [T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(positions.float(), frequency)
    cos, sin = angle.cos().repeat(1, 2).to(x.dtype), angle.sin().repeat(1, 2).to(x.dtype)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
