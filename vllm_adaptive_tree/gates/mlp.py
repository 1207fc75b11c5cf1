from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Gate(nn.Module):
    """Linear -> ReLU -> Linear -> sigmoid: C2T's classifier (3-48-1) and MCSD's second decision model (11-44-1)."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [...], between 0 and 1."""
        out: Tensor = self.layers(features.float())[..., 0].sigmoid()
        return out

    @classmethod
    def load(cls, file: str | Path, inputs: int) -> "Gate":
        """Read a safetensors file.

        Raises:
            ValueError: the file is missing, cannot be read, or holds another model; the message says which.
        """
        try:
            weights = load_file(file)
        except Exception as error:
            raise ValueError(
                f"gate: cannot read {str(file)!r} ({type(error).__name__}: {error}); give the safetensors file of a "
                "trained gate"
            ) from error
        first = weights.get("layers.0.weight", torch.empty(0))
        gate = cls(inputs, hidden=max(first.shape[0], 1) if first.dim() else 1)
        expected = {name: tuple(weight.shape) for name, weight in gate.state_dict().items()}
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        if found != expected:
            raise ValueError(
                f"gate: {str(file)!r} does not hold a gate of {inputs} features (expected layers.0 and layers.2 of "
                f"{inputs}-h-1, found {found}); give the file of a gate that was trained for this method"
            )
        gate.load_state_dict(weights)
        return gate.eval().requires_grad_(requires_grad=False)


def entropy(law: Tensor, top: int) -> Tensor:
    """- sum q ln q over the `top` largest entries of the log law [..., V], not renormalised: [...]."""
    best = law.topk(min(top, law.shape[-1])).values if top < law.shape[-1] else law
    return -(best.exp() * best.masked_fill(best == -torch.inf, 0.0)).sum(-1)
