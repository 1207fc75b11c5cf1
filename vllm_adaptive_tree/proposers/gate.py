"""Gates: small MLPs that decide, while a tree is drafted, what to keep or when to stop."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vllm_adaptive_tree.files import atomic_write

MIN_LOG_PATH = -60.0
"""Log path probabilities are clamped here; no such path is drafted."""
FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "paper": torch.exp,
    "log": lambda path: path.clamp(min=MIN_LOG_PATH),
}
"""Encodings of a path's log probability for C2T's gate; "paper": the probability itself."""
KEY = "speculative_config['tree']['gate']"


class Gate(nn.Module):
    """Linear layers with ReLU between them and a sigmoid at the end.

    C2T's classifier is 3-48-1; MCSD's decision models are 11-44-1 (type 2) and, over the hidden states of a draft of
    width 768, 768-512-256-1 (type 1).
    """

    def __init__(self, inputs: int, *hidden: int, features: str = "paper"):
        """`features`: the input encoding, one of `FEATURES`; stored in the gate's file."""
        super().__init__()
        self.inputs, self.features = inputs, features
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(inputs, size), nn.ReLU()]
            inputs = size
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, 1))

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [...] in [0, 1]; 0 for NaN, which non-finite features may give."""
        out: Tensor = self.layers(features.float())[..., 0].sigmoid().nan_to_num(0.0)
        return out

    def save(self, file: Path, about: Mapping[str, Any]) -> None:
        """Write a safetensors file atomically; `about` (JSON): how the gate was trained."""
        metadata = {"about": json.dumps(about), "features": self.features}
        atomic_write(file, save(self.state_dict(), metadata=metadata))

    @classmethod
    def load(cls, file: str | Path, inputs: int | None) -> "Gate":
        """Read a safetensors file; `inputs`: the expected number of features, None: any.

        Raises:
            ValueError: the file is missing, unreadable, or holds another model; the message says which.
        """
        try:
            with safe_open(file, framework="pt") as opened:
                weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                features = (opened.metadata() or {}).get("features", "paper")
        except Exception as error:
            raise ValueError(
                f"{KEY}: cannot read {str(file)!r} ({type(error).__name__}: {error}); give the safetensors file of a "
                "trained gate"
            ) from error
        sizes = [weight.shape for name, weight in sorted(weights.items()) if weight.dim() == 2]
        if inputs is None:
            inputs = sizes[0][1] if sizes else 1
        if features not in FEATURES:
            raise ValueError(
                f"{KEY}: {str(file)!r} reads features {features!r}, which this version does not know (it knows "
                f"{', '.join(map(repr, FEATURES))}); train it again"
            )
        gate = cls(inputs, *(max(size[0], 1) for size in sizes[:-1]), features=features)
        expected = {name: tuple(weight.shape) for name, weight in gate.state_dict().items()}
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if shapes != expected:
            raise ValueError(
                f"{KEY}: {str(file)!r} does not hold a gate of {inputs} features (expected layers {inputs}-h-..-1, "
                f"found {shapes}); give the file of a gate that was trained for this method"
            )
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise ValueError(f"{KEY}: {str(file)!r} holds numbers that are not finite; train it again")
        gate.load_state_dict(weights)
        return gate.eval().requires_grad_(requires_grad=False)


def entropy(log_probs: Tensor, top: int) -> Tensor:
    """- sum q ln q over the `top` largest entries of log q = `log_probs` [..., V], not renormalised: [...]."""
    best = log_probs.topk(top).values if top < log_probs.shape[-1] else log_probs
    return -(best.exp() * best.masked_fill(best == -torch.inf, 0.0)).sum(-1)
