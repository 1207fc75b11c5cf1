"""Devices that compile Triton kernels: trees run there as kernels over persistent buffers, elsewhere in PyTorch."""

import torch


def compiles(device: torch.device) -> bool:
    return device.type == "cuda"
