"""Where draws and rules run as kernels of their own: on devices for which those are compiled."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.legality import Draw
from vllm_adaptive_tree.engine.v2.drafts import Laws
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.kernels import FUSED_RULES, TRAVERSAL_KINDS, FusedRNG, TraversalInputs
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import CounterRNG, RandomSource


def compiles(device: torch.device) -> bool:
    return device.type == "cuda"


def counter_rng(seed: Tensor, position: Tensor, purpose: int) -> CounterRNG:
    return (FusedRNG if compiles(seed.device) else CounterRNG)(seed, position, purpose)


def draw_of(pair: Pair, rng: RandomSource) -> Draw | None:
    """The pair's rule; its p and q may be used up."""
    rule = pair.rule.draw
    return FUSED_RULES.get(rule, rule) if rule is not None and isinstance(rng, FusedRNG) else rule


def traverses(pair: Pair, target: Target) -> bool:
    """Whether the kernel of a traversal knows these children, and all rows of the target can be had at once."""
    return pair.proposer.kind in TRAVERSAL_KINDS and target.at_once


def traversal_inputs(target: Target, laws: Laws) -> TraversalInputs:
    assert laws.logits is not None
    drawn_from = laws.place[:, None] * laws.logits.shape[1] + laws.slot.clamp(min=0)
    draft = laws.logits.flatten(0, 1)
    return TraversalInputs(target.processed, target.root, draft, drawn_from, laws.temperature[laws.place])
