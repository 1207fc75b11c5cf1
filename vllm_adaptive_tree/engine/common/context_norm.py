"""Keys of the context in a head with a block (DFlash, DSpark ..) of several layers, on CPUs."""

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform


def norm_each_layer(backbone: Any) -> None:
    """Norm a layer's keys of the context by its own weights.

    vLLM norms those of all layers in one call, with weights [layers, D], and its kernel for CPUs reads the first row
    for all of them. `backbone`: a DFlashQwen3Model with its weights; on other platforms it stays as it is.
    """

    def normed(keys: Tensor) -> Tensor:  # [layers, T, heads, D]
        result = torch.empty_like(keys)
        for out, key, weight in zip(result, keys, backbone._k_norm_weights, strict=True):
            ops.rms_norm(out, key, weight, backbone._rms_norm_eps)
        return result

    if current_platform.is_cpu():
        backbone._normalize_context_k = normed
