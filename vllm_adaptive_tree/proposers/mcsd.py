"""Target-initialised multi-candidate decoding (Lu et al., arXiv 2409.10744): k-configs and forks that stop early."""

from typing import Literal

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.gates.mlp import Gate, entropy
from vllm_adaptive_tree.proposers.static_tree import StaticTree
from vllm_adaptive_tree.trees import Shape

TOP = 10
FEATURES = 1 + TOP


class Mcsd(StaticTree):
    """A k-config whose growth ends when the gate (a decision model) believes in none of the sequences.

    The root is the last token drawn from the target: target initialisation of width 1, the one that is lossless. With
    `init_width` above 1 the first layer of `shape` is that wide and drawn from the target, where a step left it tokens.
    The gate reads the laws from which a level was drawn (type 2) or the hidden states behind them (type 1), so stopping
    looks at nothing that is still to be drawn; that level stays.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        kind: Kind = "without_replacement",
        gate: Gate | None = None,
        reads: Literal["law", "hidden"] = "law",
        stop_threshold: float = 0.4,
        init_width: int = 1,
    ):
        super().__init__(shape, kind=kind)
        self.gate, self.reads, self.stop_threshold = gate, reads, stop_threshold
        self.init_width = init_width

    def goes_on(self, q: Tensor, hidden: Tensor | None, used: Tensor) -> Tensor:
        if self.gate is None:
            return super().goes_on(q, hidden, used)
        features = hidden if self.reads == "hidden" else decision_features(q.log())
        return ((self.gate(features) > self.stop_threshold) & used).any(1)


def decision_features(q: Tensor) -> Tensor:
    """Entropy and the ten largest probabilities of log laws [..., V]: [..., FEATURES]."""
    best = q.topk(min(TOP, q.shape[-1])).values.exp()
    best = torch.nn.functional.pad(best, (0, TOP - best.shape[-1]))
    return torch.cat([entropy(q, q.shape[-1])[..., None], best], -1)
