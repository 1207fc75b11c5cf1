"""Which devices compile Triton kernels: there trees run as kernels over persistent buffers, elsewhere as PyTorch
operations."""

import torch


def compiles(device: torch.device) -> bool:
    return device.type == "cuda"
