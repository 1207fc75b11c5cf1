"""Target-initialised multi-candidate decoding (Lu et al., arXiv 2409.10644): k-configs and forks that stop early."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.options import count, file, fraction, one_of, option
from vllm_adaptive_tree.proposers.gate import Gate, entropy
from vllm_adaptive_tree.proposers.options import bundled, existing_file
from vllm_adaptive_tree.proposers.static_tree import ShapedOptions, StaticTree, is_k_config
from vllm_adaptive_tree.trees import Shape

TOP = 10
FEATURES = 1 + TOP


@dataclass(frozen=True, slots=True, kw_only=True)
class McsdOptions(ShapedOptions):
    shape: Any = option((4, 2, 2, 1), is_k_config, "a k-config as [4, 2, 2, 1]")
    init_width: int = count(1)
    stop: str = one_of("none", "none", "type1", "type2")
    stop_threshold: float = fraction(0.4)
    gate: str | None = file()

    def __post_init__(self) -> None:
        super(McsdOptions, self).__post_init__()
        if self.init_width > 1 and not self.allow_lossy:
            raise ValueError(
                f"speculative_config['tree']['init_width']={self.init_width} changes the output, greedy output "
                "included; use init_width 1, or set tree: {'allow_lossy': true}"
            )

    def shipped(self) -> Path | None:
        return bundled(f"mcsd-{self.stop}.safetensors") if self.gate is None and self.stop != "none" else None


class Mcsd(StaticTree):
    """A k-config whose growth stops when the gate (decision model) rejects all its sequences.

    The root is the last token sampled from the target: target initialisation of width 1, which is lossless. With
    `init_width` above 1 the first layer of `shape` has that width and is sampled from the target, if the last step left
    such tokens. The gate reads the distributions a level was drawn from (type 2) or the hidden states that gave them
    (type 1), so the decision depends on nothing drawn later; that level is kept.
    """

    fused = "vllm_adaptive_tree.kernels.proposers:FusedMcsd"
    Options = McsdOptions
    gate: Gate | None

    def __init__(
        self,
        shape: Shape,
        *,
        kind: Kind = "without_replacement",
        gate: Gate | None = None,
        reads: Literal["probs", "hidden"] = "probs",
        stop_threshold: float = 0.4,
    ):
        super().__init__(shape, kind=kind)
        self.gate, self.reads, self.stop_threshold = gate, reads, stop_threshold

    @classmethod
    def build(cls, options: McsdOptions, *, nodes: int) -> Self:
        gate = None
        if options.stop != "none":
            file = existing_file(options.gate or options.shipped(), "gate")
            gate = Gate.load(file, inputs=None if options.stop == "type1" else FEATURES)
        first = (options.init_width,) if options.init_width > 1 else ()
        mcsd = cls(
            Shape.k_config((*first, *options.shape), nodes),
            gate=gate,
            reads="hidden" if options.stop == "type1" else "probs",
            stop_threshold=options.stop_threshold,
        ).with_children(options)
        mcsd.hidden_size = gate.inputs if gate is not None and options.stop == "type1" else None
        return mcsd

    def goes_on(self, q: Tensor, hidden: Tensor | None, used: Tensor) -> Tensor:
        if self.gate is None:
            return super().goes_on(q, hidden, used)
        features = hidden if self.reads == "hidden" else decision_features(q.log())
        return ((self.gate(features) > self.stop_threshold) & used).any(1)


def decision_features(log_probs: Tensor) -> Tensor:
    """Entropy and the ten largest probabilities, from log probabilities [..., V]: [..., FEATURES]."""
    best = log_probs.topk(min(TOP, log_probs.shape[-1])).values.exp()
    best = torch.nn.functional.pad(best, (0, TOP - best.shape[-1]))
    return torch.cat([entropy(log_probs, log_probs.shape[-1])[..., None], best], -1)
