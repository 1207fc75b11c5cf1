"""Layers of multi-head latent attention, and those that a tree cannot serve."""

from collections.abc import Mapping, Sequence
from typing import Any


def is_latent(layer: Any) -> bool:
    """Return whether a layer, one of `checks.attention_layers`, is of multi-head latent attention."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(layer, MLAAttention)


def check_layer(name: str, layer: Any) -> None:
    """Refuse a layer of multi-head latent attention for which a tree would be wrong."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    backend = layer.attn_backend
    if not current_platform.is_cpu() and backend.get_builder_cls().query_len_support != QueryLenSupport.VARLEN:
        raise ValueError(
            f"model: layer {name!r} has the latent attention of {backend.get_name()}, which takes a batch's lengths "
            "from the host, and those of trees are known to the device alone; set attention_config['backend_per_kind'] "
            "to {'mla_attention': 'FLASH_ATTN_MLA'} (compute capability 9.0) or {'mla_attention': 'FLASHINFER_MLA'} "
            "(10.x), or use a chain ('draft_model')"
        )

    for refused, what in (
        (type(layer) is not MLAAttention, f"{type(layer).__name__}, which is another latent attention"),
        (layer.use_sparse, "sparse attention, whose choice of tokens is that of a sequence"),
        (layer.sliding_window is not None, "a sliding window"),
        (is_quantized_kv_cache(layer.kv_cache_dtype), f"a latent cache of {layer.kv_cache_dtype}"),
    ):
        if refused:
            raise ValueError(
                f"model: layer {name!r} uses {what}, which a tree method does not support; use another target, or a "
                "chain ('draft_model')"
            )


def check_block_sizes(layers: Mapping[str, Any], groups: Sequence[Any]) -> None:
    """Refuse latent ones among `layers` whose backend reads smaller blocks than the KV cache of their group has; known
    once the cache exists."""
    for group in groups:
        for name in group.layer_names:
            if name not in layers or not is_latent(layers[name]):
                continue
            size, kernel = group.kv_cache_spec.block_size, layers[name].kv_cache.shape[1]
            if size != kernel:
                backend = layers[name].attn_backend.get_name()
                raise ValueError(
                    f"block_size={size} is not supported with a tree method and the latent attention of {backend}, "
                    f"which reads blocks of {kernel}; set block_size to {kernel}"
                )
