"""A Llama in GGUF as transformers' files: weights in bfloat16, config, tokenizer, chat template.

What it does not know (a tensor, a key of the model, a pre-tokenizer) is refused, never left out.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SIZES = {  # key of a GGUF file -> key of a config
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.vocab_size": "vocab_size",
}
BASE, EPSILON, ROTATED = "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon", "llama.rope.dimension_count"
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3
"""Type of a control token."""


def convert(source: Path, folder: Path) -> int:
    """Write the files to an existing folder; returns the number of parameters.

    Raises:
        ValueError: the file is no GGUF, or has something that is not converted.
        OSError: a file cannot be written.
    """
    reader = GGUFReader(source)
    known = Metadata(reader)
    weights = _weights(reader, known)
    config = _config(known, tied="lm_head.weight" not in weights)
    tokenizer, settings = _tokenizer(known)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{folder / 'model.safetensors'}: {error}") from error
    tokens = {key: value for key, value in config.items() if key.endswith("_token_id")}
    for name, value in {
        "config.json": config,
        "generation_config.json": tokens,
        "tokenizer_config.json": {**settings, "model_max_length": config["max_position_embeddings"]},
    }.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    if (template := known.get("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return sum(weight.numel() for weight in weights.values())


class Metadata:
    """Keys and values of a GGUF file with a Llama."""

    def __init__(self, reader: GGUFReader) -> None:
        self.fields = reader.fields
        for key, expected in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if self[key] != expected:
                raise ValueError(f"{key} is {self[key]!r}; only {expected!r} is converted")
        if self.get("tokenizer.ggml.add_bos_token"):
            raise ValueError("tokenizer.ggml.add_bos_token is set, which is not converted")
        unknown = [key for key in self.fields if key.startswith("llama.")]
        unknown = sorted({*unknown} - {*SIZES, BASE, EPSILON, ROTATED})
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not converted")

    def __getitem__(self, key: str) -> Any:
        if key not in self.fields:
            raise ValueError(f"the file has no {key}")
        return self.fields[key].contents()

    def get(self, key: str) -> Any:
        return self[key] if key in self.fields else None


def _weights(reader: GGUFReader, known: Metadata) -> dict[str, torch.Tensor]:
    heads = {"attn_q": known["llama.attention.head_count"], "attn_k": known["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        match tensor.name.split("."):
            case [name, "weight"] if name in OUTSIDE:
                full = OUTSIDE[name]
            case ["blk", layer, name, "weight"] if name in IN_A_LAYER:
                full = f"model.layers.{layer}.{IN_A_LAYER[name]}"
            case _:
                raise ValueError(f"tensor {tensor.name}: not converted")
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if name in heads:
            weight = _halves(weight, heads[name])
        weights[f"{full}.weight"] = weight.to(torch.bfloat16).contiguous()
    return weights


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head with the rotated pairs as two halves, as transformers has them; llama.cpp interleaves them."""
    pairs = weight.shape[0] // heads // 2
    return weight.view(heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


def _config(known: Metadata, *, tied: bool) -> dict[str, Any]:
    sizes = {name: int(known[key]) for key, name in SIZES.items()}
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    if known[ROTATED] != width:
        raise ValueError(
            f"{ROTATED} is {known[ROTATED]}, heads have {width} dimensions: partial rotation is not converted"
        )
    tokens = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        **sizes,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(known[EPSILON]),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(known[BASE])},
        "tie_word_embeddings": tied,
        **{key: known[f"tokenizer.ggml.{name}_token_id"] for key, name in tokens.items()},
    }


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(known: Metadata) -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level BPE after a split at every digit, and what tokenizer_config.json says of it."""
    tokens: list[str] = known["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in known["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = known["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **{role: tokens[known[f"tokenizer.ggml.{name}_token_id"]] for role, name in roles.items()},
    }
