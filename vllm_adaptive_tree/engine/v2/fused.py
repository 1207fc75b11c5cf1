"""Where draws and rules run as kernels of their own: on devices for which those are compiled."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.pairs import Draw
from vllm_adaptive_tree.engine.v2.drafts import Laws
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.kernels import FUSED, KINDS, FusedNoise, Tables
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.noise import KeyedNoise, Noise


def compiles(device: torch.device) -> bool:
    return device.type == "cuda"


def keyed_noise(seed: Tensor, position: Tensor, purpose: int) -> KeyedNoise:
    return (FusedNoise if compiles(seed.device) else KeyedNoise)(seed, position, purpose)


def draw_of(pair: Pair, noise: Noise) -> Draw | None:
    """The pair's rule; its p and q may be used up."""
    rule = pair.rule.draw
    return FUSED.get(rule, rule) if rule is not None and isinstance(noise, FusedNoise) else rule


def traverses(pair: Pair, target: Target) -> bool:
    """Whether the kernel of a traversal knows these children, and all rows of the target can be had at once."""
    return pair.proposer.kind in KINDS and target.at_once


def tables_of(target: Target, laws: Laws) -> Tables:
    assert laws.logits is not None
    drawn_from = laws.place[:, None] * laws.logits.shape[1] + laws.slot.clamp(min=0)
    draft = laws.logits.flatten(0, 1)
    return Tables(target.processed, target.root, draft, drawn_from, laws.temperature[laws.place])
