"""Engine arguments on an NVIDIA GPU: the device, the attention backend, CUDA graphs."""

import copy
from typing import Any

import torch
from vllm.config.attention import AttentionConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_adaptive_tree.engine.checkpoint import written_config
from vllm_adaptive_tree.engine.targets.checks import FP8, cache_dtypes, own_dtype

LEAST = 80
"""Least compute capability, 8.0: bfloat16, asynchronous copies and FlashAttention begin there."""
OF_8_BITS = 90, 100
"""Families of compute capabilities on which vLLM's FlashAttention reads K/V of 8 bits."""
REQUESTS = 256
"""vLLM's smallest default of `max_num_seqs` on a GPU."""


def check_device() -> None:
    """Refuse a device that is neither a CPU nor an NVIDIA GPU that the kernels are compiled for."""
    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        name = current_platform.device_name or type(current_platform).__name__
        raise ValueError(
            f"speculative_config['method']: tree methods run on NVIDIA GPUs and on CPUs, and vLLM's platform here is "
            f"{name!r}; use vLLM's own 'draft_model' on it"
        )
    if not current_platform.has_device_capability(LEAST):
        capability = current_platform.get_device_capability()
        version = "unknown" if capability is None else capability.as_version_str()
        raise ValueError(
            f"speculative_config['method']: tree methods need a GPU of compute capability 8.0 or more, and that of "
            f"{current_platform.get_device_name()} is {version}: it has neither bfloat16 nor the asynchronous copies "
            "of the attention kernels; use vLLM's own 'draft_model' on it"
        )


def check_config(config: Any) -> None:
    """Refuse what a built VllmConfig says of layers that the tree kernel takes over.

    Raises:
        ValueError: float32: FlashAttention, whose cache the kernel reads, has 16 bits; or K/V of 8 bits where it has
            none. Or the attention's results are quantised inside it, in one compiled piece with what follows.
    """
    of_8_bits = any(map(current_platform.is_device_capability_family, OF_8_BITS))
    for asked, dtype in cache_dtypes(config):
        if dtype in FP8 and not of_8_bits:
            raise ValueError(
                f"{asked} is not supported with a tree method on {current_platform.get_device_name()}: FlashAttention "
                "reads K/V of 8 bits on GPUs of compute capability 9.x and 10.x alone; use "
                f"{own_dtype(config.model_config)!r}, the model's own dtype"
            )
    if config.compilation_config.pass_config.fuse_attn_quant:
        raise ValueError(
            "compilation_config['pass_config']['fuse_attn_quant'] is not supported with a tree method: the attention "
            "of a tree runs between compiled pieces and quantises nothing; set it to false"
        )
    for name, model in (
        ("dtype", config.model_config),
        ("the draft's dtype", config.speculative_config.draft_model_config),
    ):
        if model.dtype == torch.float32:
            raise ValueError(
                f"{name}='float32' is not supported with a tree method on a GPU: its layers need FlashAttention, which "
                "computes in 16 bits; use dtype='bfloat16' or 'float16'"
            )


LATENT, FULL = "mla_attention", "full_attention"
"""Keys of vLLM's `backend_per_kind`."""


def set_backend(args: Any) -> None:
    """Ask for FlashAttention where the user names no backend, for the draft as well: the draft has the target's. Latent
    layers keep vLLM's choice, or the user's; their cache is the same.

    Raises:
        ValueError: the user names another one.
    """
    latent = _is_latent(args)
    config = copy.deepcopy(args.attention_config)
    named = AttentionConfig.validate_backend_before(args.attention_backend) or config.backend
    if latent:
        of_latents = {} if named in (None, AttentionBackendEnum.FLASH_ATTN) else {LATENT: named}
        config.backend_per_kind = {FULL: AttentionBackendEnum.FLASH_ATTN, **of_latents, **config.backend_per_kind}
        args.attention_backend = config.backend = named = None
    named_backends = [named, *(backend for kind, backend in config.backend_per_kind.items() if kind != LATENT)]
    refused = next(
        (backend for backend in named_backends if backend not in (None, AttentionBackendEnum.FLASH_ATTN)), None
    )
    if refused is not None:
        raise ValueError(
            f"attention_backend={refused.name!r} is not supported with a tree method on a GPU; remove it, or use "
            "'FLASH_ATTN': the tree kernel reads that backend's cache"
        )
    if named is None and not latent:
        args.attention_backend, config.backend = None, AttentionBackendEnum.FLASH_ATTN
    args.attention_config = config


def _is_latent(args: Any) -> bool:
    """Return whether a target has multi-head latent attention."""
    try:
        written = written_config(args.model, args.revision, args.trust_remote_code)
    except Exception:  # vLLM reports it
        return False
    return any(part.get("kv_lora_rank") is not None for part in (written, written.get("text_config") or {}))


def keep_updates(config: Any) -> None:
    """Let no compiled pass write the latents of a draft: its layer drops those of nodes, and NaN."""
    if config.speculative_config.draft_model_config.use_mla:
        config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False


def set_graphs(args: Any, nodes: int, trees: int, most: int) -> None:
    """Capture CUDA graphs, where the user names no sizes, up to as many rows as so many trees of `nodes` have, and at
    `most` so many. Their mode is vLLM's: the tree kernel is in whole graphs, and runs between the pieces of others."""
    config = copy.deepcopy(args.compilation_config)
    sizes = (config.cudagraph_capture_sizes, args.cudagraph_capture_sizes)
    largest = (config.max_cudagraph_capture_size, args.max_cudagraph_capture_size)
    if (*sizes, *largest) == (None,) * 4:
        requests = args.max_num_seqs or REQUESTS
        rows = max(min(requests, trees) * (1 + nodes), requests)
        config.max_cudagraph_capture_size = captured(min(most, rows))
    args.compilation_config = config


def captured(rows: int) -> int:
    """The first size of vLLM's CUDA graphs that holds so many rows; it captures none above the last one up to the
    maximum that it is given."""
    step = 1 if rows <= 2 else 2 if rows <= 4 else 8 if rows <= 256 else 16
    return -(-rows // step) * step
