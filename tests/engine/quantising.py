"""Checkpoints with weights of 4 bits, rounded to the nearest: in the formats of GPTQ and AWQ."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BITS, ZERO = 32, 4, 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> numbers from 0 to 15 [K, N] int32, and scales [K / GROUP, N]."""
    parts = weight.float().T.unflatten(0, (-1, GROUP))
    scale = parts.abs().amax(1, keepdim=True) / 7
    return ((parts / scale).round() + ZERO).clamp(0, 15).flatten(0, 1).int(), scale[:, 0]


def _packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[.., 8 n] -> [.., n] int32."""
    parts = numbers.long().unflatten(-1, (-1, 8))[..., list(order)]
    words = (parts << torch.arange(0, 32, BITS)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    numbers, scale = _groups(weight)
    zeros = torch.full_like(scale, ZERO - 1).int()
    return {
        f"{name}.qweight": _packed(numbers.T.contiguous()).T.contiguous(),
        f"{name}.qzeros": _packed(zeros),
        f"{name}.scales": scale.bfloat16(),
        f"{name}.g_idx": torch.arange(len(numbers), dtype=torch.int32) // GROUP,
    }


def _awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    numbers, scale = _groups(weight)
    zeros = torch.full_like(scale, ZERO).int()
    return {
        f"{name}.qweight": _packed(numbers, AWQ_ORDER),
        f"{name}.qzeros": _packed(zeros, AWQ_ORDER),
        f"{name}.scales": scale.bfloat16(),
    }


def _quantised(folder: Path, method: Callable[[str, Tensor], dict[str, Tensor]], config: dict[str, object]) -> None:
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        changed = method(name.removesuffix(".weight"), weight) if "_proj.weight" in name else {name: weight}
        weights |= changed
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


def gptq(folder: Path) -> None:
    _quantised(
        folder, _gptq, {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}
    )


def awq(folder: Path) -> None:
    config = {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    _quantised(folder, _awq, config)
