"""An EAGLE-3 head (arXiv 2503.01840) for Llama-like targets, as vLLM's `LlamaForCausalLMEagle3` computes it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Targets whose last layer has the matrices of a Llama's, from which a head starts."""


class Dimensions(NamedTuple):
    """Dimensions that a head takes from its target's configuration."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Dimensions from a target's `config.json`.

        Raises:
            ValueError: the target is not Llama-like.
        """
        kind, activation = config.get("model_type"), config.get("hidden_act", "silu")
        if kind not in MODEL_TYPES or activation != "silu":
            raise ValueError(
                f"the target is not Llama-like: its model_type is {kind!r} and its hidden_act {activation!r}; a head "
                f"can be trained for {', '.join(MODEL_TYPES)} with 'silu'"
            )
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        return cls(
            hidden=config["hidden_size"],
            mlp=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            rope_theta=rope.get("rope_theta", 10_000.0),
            eps=config["rms_norm_eps"],
        )


def auxiliary_layers(count: int, given: Sequence[int] | None = None, *, first: int = 0) -> tuple[int, ...]:
    """Layers of a target with `count`, whose inputs a head reads: those `given`, or vLLM's default. `first`: the least
    that the head takes, 1 if it reads outputs of layers and not the embeddings.

    Raises:
        ValueError: they are not ascending numbers of layers. vLLM would sort them, and merge equal ones.
    """
    layers = (2, count // 2, count - 3) if given is None else tuple(given)
    if count <= first:
        raise ValueError(f"a target of {count} layers is too small for this kind of head: it needs {first + 1}")
    if list(layers) != sorted(set(layers)) or not first <= layers[0] <= layers[-1] < count:
        example = sorted({first, (first + count - 1) // 2, count - 1})
        raise ValueError(
            f"{layers} are no auxiliary layers of a target with {count} layers"
            + (" (they are vLLM's default, 2, L // 2 and L - 3)" if given is None else "")
            + f": give ascending numbers from {first} to {count - 1}, as in --auxiliary-layers "
            + " ".join(map(str, example))
        )
    return layers


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Attention of one draft layer over the rows of all steps that led to it."""

    def __init__(self, size: Dimensions):
        super().__init__()
        self.size = size
        queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(2 * size.hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * size.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * size.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, size.hidden, bias=False)

    def forward(self, x: Tensor, past: "Past") -> tuple[Tensor, "Past"]:
        """x [B, T, 2H] of step len(past) -> [B, T, H], and `past` with this step's keys and values.

        Row t of step j sees what a draft does: rows up to t - j of step 0 (the context), row t - j + i of every later
        step i (its ancestors), and itself.
        """
        size, step, (batch, rows, _) = self.size, len(past), x.shape
        groups = size.heads // size.kv_heads
        query = _rotate(self._split(self.q_proj(x), size.heads), size.rope_theta)
        key = _rotate(self._split(self.k_proj(x), size.kv_heads), size.rope_theta).repeat_interleave(groups, 1)
        value = self._split(self.v_proj(x), size.kv_heads).repeat_interleave(groups, 1)
        past = [*past, (key, value)]
        query = query * size.head_dim**-0.5
        at = torch.arange(rows, device=x.device)
        context = (query @ past[0][0].transpose(-1, -2)).float()
        context = context.masked_fill(at > at[:, None] - step, -1e9)  # finite: rows below `step` see no key
        ancestors = [(query * _later(past[i][0], step - i)).sum(-1, keepdim=True).float() for i in range(1, step + 1)]
        weight = torch.cat([context, *ancestors], -1).softmax(-1).to(value.dtype)
        out = weight[..., :rows] @ past[0][1]
        for i in range(1, step + 1):
            out = out + weight[..., rows + i - 1, None] * _later(past[i][1], step - i)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1)), past

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.size.head_dim)).transpose(1, 2)


Past = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, T, head_dim] of each step so far."""


class MLP(nn.Module):
    def __init__(self, size: Dimensions):
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.mlp, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.mlp, bias=False)
        self.down_proj = nn.Linear(size.mlp, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, size: Dimensions):
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = MLP(size)
        self.input_layernorm = Norm(size.hidden, size.eps)
        self.hidden_norm = Norm(size.hidden, size.eps)
        self.post_attention_layernorm = Norm(size.hidden, size.eps)

    def forward(self, embedded: Tensor, state: Tensor, past: Past) -> tuple[Tensor, Past]:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        attended, past = self.self_attn(both, past)
        state = state + attended
        return state + self.mlp(self.post_attention_layernorm(state)), past


class Head(nn.Module):
    """One decoder layer that reads a token and the target's states before it.

    Parameters are named as in vLLM's checkpoints. `draft_vocabulary`: the head has an output matrix of so many rows;
    None: the target's is used, and is not a parameter.
    """

    def __init__(self, size: Dimensions, auxiliary: int = 3, draft_vocabulary: int | None = None):
        super().__init__()
        self.fc = nn.Linear(auxiliary * size.hidden, size.hidden, bias=False)
        self.midlayer = Layer(size)
        self.norm = Norm(size.hidden, size.eps)
        self.lm_head = None if draft_vocabulary is None else nn.Linear(size.hidden, draft_vocabulary, bias=False)

    def forward(self, auxiliary: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Unroll `steps` drafting steps from every row at once (training-time test).

        Args:
            auxiliary: [B, T, A * H], row t: the target's states at token t.
            embedded: [B, T, H], row t: of token t + 1.

        Returns:
            Normed states [B, T, H] of each step, for the output matrix. Row t predicts token t + 2; at step j it is a
            node of depth j below row t - j, so rows above j are undefined.
        """
        state, states = self.fc(auxiliary), []
        past: Past = []
        for _ in range(steps):
            state, past = self.midlayer(embedded, state, past)
            states.append(self.norm(state))
            state = _later(state, 1)  # a row continues from the state of the row before
        return states


def _later(x: Tensor, rows: int) -> Tensor:
    """Move [.., T, D] `rows` rows down, with zeros above."""
    return F.pad(x, (0, 0, rows, 0))[..., : x.shape[-2], :]


def _rotate(x: Tensor, theta: float) -> Tensor:
    """RoPE of [B, heads, T, D], row t at position t."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(x.shape[2], device=x.device, dtype=torch.float32), frequency)
    cos, sin = angle.cos().repeat(1, 2).to(x.dtype), angle.sin().repeat(1, 2).to(x.dtype)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
