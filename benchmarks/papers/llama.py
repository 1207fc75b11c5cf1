"""A small Llama in plain PyTorch whose rows say themselves what they may see: texts, paths and trees."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu


class Cache:
    """Keys and values of R sequences, [layers, R, S, key heads, size of a head] each; S grows as needed."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def of(self, requests: Tensor) -> "Cache":
        """A copy for these requests."""
        return Cache(self.keys[:, requests], self.values[:, requests])

    def reserve(self, places: int) -> None:
        if missing := max(places - self.keys.shape[2], 0):
            more = (0, 0, 0, 0, 0, missing + 64)
            self.keys, self.values = pad(self.keys, more), pad(self.values, more)


class Llama:
    """Float32, tied embeddings, as the bundled pair has them."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        assert config["tie_word_embeddings"]
        assert not config.get("attention_bias")
        self.eps, self.size = config["rms_norm_eps"], config["head_dim"]
        self.heads, self.key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = []
        for number in range(config["num_hidden_layers"]):
            own = f"model.layers.{number}."
            layer = {name.removeprefix(own): weight for name, weight in weights.items() if name.startswith(own)}
            qkv = torch.cat([layer[f"self_attn.{name}_proj.weight"] for name in "qkv"])
            up = torch.cat([layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up")])
            norms = layer["input_layernorm.weight"], layer["post_attention_layernorm.weight"]
            self.layers.append((*norms, qkv, layer["self_attn.o_proj.weight"], up, layer["mlp.down_proj.weight"]))
        theta = config["rope_parameters"]["rope_theta"]
        angle = theta ** (-torch.arange(0, self.size, 2) / self.size)
        turn = torch.outer(torch.arange(config["max_position_embeddings"]).float(), angle).repeat(1, 2)
        self.cos, self.sin = turn.cos(), turn.sin()

    def empty(self, requests: int) -> Cache:
        shape = (len(self.layers), requests, 0, self.key_heads, self.size)
        return Cache(torch.zeros(shape), torch.zeros(shape))

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.embedding)

    def read(
        self, cache: Cache, tokens: Tensor, positions: Tensor, places: Tensor, visible: Tensor, requests: Tensor | None
    ) -> Tensor:
        """Hidden states [R, W, H] of W tokens of each request, zero where there is none.

        Args:
            tokens: [R, W], -1: none.
            positions: [R, W].
            places: [R, W] where in the cache each token's keys and values are written.
            visible: [R, W, S] bool, which places each row sees (its own included); S covers all of them.
            requests: [R] of the cache; None: all.
        """
        used = tokens >= 0
        r, w = used.nonzero(as_tuple=True)  # [M]: only real rows cost a row
        row = r if requests is None else requests[r]
        place, span = places[r, w], visible.shape[2]
        cache.reserve(span)
        cos, sin = (table[positions[r, w]][:, None] for table in (self.cos, self.sin))
        group = self.heads // self.key_heads
        mask = (visible | ~used[:, :, None])[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
        x = self.embedding[tokens[r, w]]
        for number, (before, behind, qkv, out, up, down) in enumerate(self.layers):
            heads = linear(rms_norm(x, x.shape[-1:], before, self.eps), qkv).view(len(r), -1, self.size)
            q, k, v = heads.split([self.heads, self.key_heads, self.key_heads], 1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            cache.keys[number, row, place], cache.values[number, row, place] = k, v
            keys, values = cache.keys[number, :, :span], cache.values[number, :, :span]  # [R, S, KV, D]
            if requests is not None:
                keys, values = keys[requests], values[requests]
            query = q.new_zeros(*tokens.shape, self.heads, self.size).index_put((r, w), q)  # [R, W, heads, D]
            query = query.unflatten(2, (self.key_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
            attended = scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2), mask)
            attended = attended.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4)[r, w].flatten(1)
            x = x + linear(attended, out)
            gate, value = linear(rms_norm(x, x.shape[-1:], behind, self.eps), up).chunk(2, -1)
            x = x + linear(silu(gate) * value, down)
        x = rms_norm(x, x.shape[-1:], self.norm, self.eps)
        return x.new_zeros(*tokens.shape, x.shape[1]).index_put((r, w), x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
