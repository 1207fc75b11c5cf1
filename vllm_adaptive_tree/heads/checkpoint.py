"""Checkpoints of heads, as vLLM reads `LlamaForCausalLMEagle3` and `Qwen3DSparkModel`, and of drafts of layers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.heads.dspark import Block, BlockHead
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MAP = "d2t", "t2d"  # as `tables` gives them
LAYERED = ("num_hidden_layers", "layer_types")  # keys of a configuration that speak of layers


def write(folder: Path, head: Head, target: Mapping[str, Any], layers: Sequence[int], draft_ids: Tensor | None) -> None:
    """Write `config.json` and the weights in bfloat16.

    Args:
        target: its `config.json`. The head shares its embeddings, and without `draft_ids` its output matrix.
        layers: of the target, whose inputs the head reads.
        draft_ids: [D] int64, ascending: the target's ids of the head's own vocabulary.
    """
    vocabulary = Dimensions.of(target).vocabulary
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        **_shape(target),
        "draft_vocab_size": vocabulary if draft_ids is None else len(draft_ids),
        "tie_word_embeddings": False,
        # Model Runner V2 reads the first, the head's class the second
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        **_special(target),
    }
    _save(folder, _tensors(head) | _map(draft_ids, vocabulary), config)


def write_block(
    folder: Path, head: BlockHead, target: Mapping[str, Any], layers: Sequence[int], draft_ids: Tensor | None = None
) -> None:
    """Write the files of a one-forward head; arguments as for `write`. vLLM's DFlash reads them too, without
    `markov_head`.

    The block begins with the root, which predicts nothing (`sample_from_anchor` false), so `block_size` is 1 + K.
    """
    block = head.block
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": block.layers,
        **_shape(target),
        "draft_vocab_size": target["vocab_size"] if draft_ids is None else len(draft_ids),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": 1 + block.depth,
        "sample_from_anchor": False,
        "mask_token_id": block.mask,
        "markov_rank": block.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        # vLLM's numbers here are of layers whose outputs are read
        "dflash_config": {"mask_token_id": block.mask, "target_layer_ids": [layer - 1 for layer in layers]},
        **_special(target),
    }
    _save(folder, _tensors(head) | _map(draft_ids, target["vocab_size"]), config)


def write_layers(folder: Path, draft: Any, target: Mapping[str, Any]) -> None:
    """Write the files of an independent draft.

    Args:
        draft: a model of transformers with some of the target's layers.
        target: the target's `config.json`.
    """
    layered = {name: getattr(draft.config, name) for name in LAYERED if name in target}
    config, tensors = {**target, **layered, "dtype": "bfloat16"}, _tensors(draft)
    if target.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    _save(folder, tensors, config)


def read_block(folder: Path, auxiliary: int) -> BlockHead:
    """Read a head that `write_block` has written, in float32; `auxiliary`: states of the target that it reads.

    Raises:
        ValueError: it is another head.
    """
    config = json.loads((folder / CONFIG).read_text())
    if config["architectures"] != ["Qwen3DSparkModel"] or config.get("sample_from_anchor", True):
        raise ValueError(f"{folder} holds no head that `train-head --kind dspark` has written")
    block = Block(config["num_hidden_layers"], config["block_size"] - 1, config["markov_rank"], config["mask_token_id"])
    drafted = None if config["draft_vocab_size"] == config["vocab_size"] else config["draft_vocab_size"]
    head = BlockHead(Dimensions.of(config), auxiliary, block, drafted)
    tensors = load_file(folder / WEIGHTS)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items() if name not in MAP})
    return head


def _shape(target: Mapping[str, Any]) -> dict[str, Any]:
    size = Dimensions.of(target)
    return {
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.mlp,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "rms_norm_eps": size.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_theta},
        "max_position_embeddings": target["max_position_embeddings"],
        "vocab_size": size.vocabulary,
    }


def _special(target: Mapping[str, Any]) -> dict[str, Any]:
    return {name: target[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in target}


def _tensors(head: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}


def _map(draft_ids: Tensor | None, vocabulary: int) -> dict[str, Tensor]:
    """Tensors that say which tokens a draft knows; none if it knows all."""
    return {} if draft_ids is None else dict(zip(MAP, tables(draft_ids, vocabulary), strict=True))


def _save(folder: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    atomic_write(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def tables(draft_ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """`d2t` [D] int64, target id minus draft id, and `t2d` [V] bool, True if the draft knows a target id."""
    member = torch.zeros(vocabulary, dtype=torch.bool)
    member[draft_ids] = True
    return draft_ids - torch.arange(len(draft_ids)), member


def most_frequent(tokens: Tensor, vocabulary: int, count: int) -> Tensor:
    """The `count` most frequent ids of `tokens`, ascending, [count] int64.

    Raises:
        ValueError: the vocabulary has no more than `count` ids.
    """
    if count >= vocabulary:
        raise ValueError(f"a draft vocabulary of {count} is no smaller than the target's of {vocabulary}")
    return torch.bincount(tokens, minlength=vocabulary).argsort(descending=True, stable=True)[:count].sort().values
