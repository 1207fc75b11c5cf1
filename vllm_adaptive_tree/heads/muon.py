"""Muon, as `torch.optim.Muon` computes it, in float32.

Its products of bfloat16 took three quarters of a step of training on CPUs without instructions for them.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
ITERATIONS, MOMENTUM, LEAST_NORM = 5, 0.95, 1e-7


class Muon(Optimizer):
    """Momentum whose update of a matrix is made orthogonal; rates are those of AdamW.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate.
        weight_decay: times the learning rate, in each step.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            rate = group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly orthogonal matrix of the same singular vectors, by Newton and Schulz."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
