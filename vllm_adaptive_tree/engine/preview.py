"""What a configuration will do, by what the files of its models say: no engine, no network, and no vLLM."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_adaptive_tree.acceptance import TargetOnly
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.checkpoint import Checkpoint, local_folder, tensor_shapes
from vllm_adaptive_tree.engine.common.node_quota import schedule, too_small
from vllm_adaptive_tree.engine.drafts.base import DraftKind, check_ranks, check_vocabulary
from vllm_adaptive_tree.engine.drafts.registry import kind_in, kind_of, refuse_head
from vllm_adaptive_tree.engine.startup.draft_memory import LevelBuffers
from vllm_adaptive_tree.engine.targets.families import ALLOWED, follows_chains
from vllm_adaptive_tree.methods import Pair, as_chains, clamp_budget, resolve


class Arguments(NamedTuple):
    """Engine arguments that a preview depends on; None: what the target's config.json says."""

    model: str
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    dtype: str = "auto"


def preview(speculation: Mapping[str, Any], given: Arguments) -> dict[str, Any]:
    """Preview of a speculative_config, as JSON has it.

    Raises:
        ValueError: it would be refused; the message names the key and the remedy.
    """
    options, keys = TreeOptions.parse(speculation)
    target = _read(given.model, "model")
    refuse_head(target.model, target.config, target.tensors)
    architectures = target.config.get("architectures") or ["none"]
    hybrid = follows_chains(architectures)
    options = as_chains(options) if hybrid else options
    pair = resolve(options)
    options = clamp_budget(options, pair.proposer)
    text = _text(target)
    kind, draft = _draft(options, keys, target)
    levels = kind.levels(draft)
    if options.text is None:
        sizes = [one.get("vocab_size") for one in (_text(draft), text)]
        if None not in sizes:
            check_vocabulary(draft, *sizes)
        check_ranks(draft, SimpleNamespace(**_text(draft)), given.tensor_parallel_size, keys)
    kind.check_method(pair)
    options = replace(options, levels=levels)
    nodes, room = options.num_speculative_tokens, given.max_num_batched_tokens
    longest = given.max_model_len or text.get("max_position_embeddings") or room
    depth = min(pair.proposer.max_depth, levels or nodes, nodes)
    notes = [
        f"{', '.join(architectures)}: no target of this class is tested with trees, and its layers are checked when it "
        "is loaded"
    ]
    notes = [] if set(architectures) & set(ALLOWED) else notes
    notes += ["its trees are chains, which need vLLM 0.33"] if hybrid else []
    notes += [f"allow_lossy: {pair.loss}"] if pair.loss is not None else []
    shipped = options.tree.shipped()
    notes += [f"{shipped.name} is the bundled pair's: train one for yours"] if shipped is not None else []
    quotas = schedule(requests=given.max_num_seqs, nodes=nodes, room=room, budget=options.tree.budget)
    small = too_small(nodes=nodes, room=room, longest=longest)
    return {
        "method": options.method,
        "target": {"model": given.model, "architectures": architectures},
        "draft": {"model": keys["model"], "kind": kind.name, "is": kind.title, "levels": levels},
        "rule": pair.rule_name,
        "lossless": pair.lossless,
        "children": pair.proposer.children,
        "nodes": nodes,
        "depth": depth,
        "budget": options.tree.budget,
        "nodes_up_to_requests": {str(last): share for _, last, share in quotas},
        "memory": _memory(options, pair, kind, draft, given, text)._asdict(),
        "notes": [*notes, *([small] if small else [])],
    }


class Memory(NamedTuple):
    """Bytes of each rank."""

    weights: int | None
    """None: not known from the names and shapes of tensors."""
    kv_per_token: int
    level_buffers: int
    """Most: of a full batch."""


def _memory(
    options: TreeOptions, pair: Pair, kind: DraftKind, draft: Checkpoint, given: Arguments, text: Mapping[str, Any]
) -> Memory:
    dtype = text.get("dtype") or text.get("torch_dtype") or "bfloat16" if given.dtype == "auto" else given.dtype
    size, ranks = getattr(torch, str(dtype)).itemsize, given.tensor_parallel_size
    config = _text(draft)
    levels = LevelBuffers.of(
        requests=given.max_num_seqs,
        nodes=options.num_speculative_tokens,
        depth=min(pair.proposer.max_depth, options.levels or pair.proposer.max_depth),
        vocabulary=text.get("vocab_size", 0),
        size=size if options.text is None else torch.float32.itemsize,
        hidden=config.get("hidden_size") if kind.node_states and not kind.independent else None,
        kept=pair.rule is not TargetOnly,
        depths=options.levels or 0,
    )
    if options.text is not None:
        return Memory(0, 0, sum(levels))
    heads = config.get("num_attention_heads", 1)
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config.get("hidden_size", 0) // heads
    in_target = kind.part_of_target is not None and draft.model == given.model
    layers = 1 if in_target else config.get("num_hidden_layers", 1)
    shapes = None if in_target or "quantization_config" in config else draft.tensors
    known = shapes and all(shape is not None for shape in shapes.values())
    weights = sum(prod(shape or ()) for name, shape in (shapes or {}).items() if name != "t2d")
    kv = 2 * layers * ceil(kv_heads / ranks) * width * size
    if (rank := config.get("kv_lora_rank")) is not None:  # latents, which every rank keeps
        kv = layers * (rank + config.get("qk_rope_head_dim", 0)) * size
    return Memory(weights * size // ranks if known else None, kv, sum(levels))


def _text(model: Checkpoint) -> dict[str, Any]:
    """Keys of the config.json of a model of text, or of the part of a model that reads it."""
    return {**model.flat, **(model.config.get("text_config") or {})}


def _draft(options: TreeOptions, keys: dict[str, Any], target: Checkpoint) -> tuple[DraftKind, Checkpoint]:
    if options.text is not None:
        return kind_in(options), Checkpoint(keys["model"], {}, None)
    if keys.get("model") is None:
        keys["model"] = target.model
    draft = target if keys["model"] == target.model else _read(keys["model"], "speculative_config['model']")
    return kind_of(draft, said=options.draft, target=target.model), draft


def _read(model: str, key: str) -> Checkpoint:
    folder = local_folder(model)
    file = None if folder is None else folder / "config.json"
    if file is None or not file.is_file():
        raise ValueError(f"{key}: there is no {model!r} with a config.json on this machine; give a folder, or fetch it")
    return Checkpoint(model, json.loads(file.read_text()), tensor_shapes(model, ask_hub=False))
