"""Dispatch of samples and rules to Triton kernels, on devices that compile them."""

from torch import Tensor

from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels import FusedRNG
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import CounterRNG


def counter_rng(seed: Tensor, position: Tensor, purpose: int) -> CounterRNG:
    return (FusedRNG if compiles(seed.device) else CounterRNG)(seed, position, purpose)


def fused_traversal(
    pair: Pair, logits: Tensor, root: Tensor, verification: Verification, rng: FusedRNG, active: Tensor | None
) -> Accepted | None:
    """Traversal by kernel; None if it does not know the children.

    Args:
        logits: [rows, V] of the target, processed.
        root: [R] row of each root.
        active: [R] bool; None for all.
    """
    if pair.proposer.kind not in kernels.TRAVERSAL_KINDS:
        return None
    draft = verification.draft
    assert draft.logits is not None
    rows = draft.place[:, None] * draft.logits.shape[1] + draft.slot.clamp(min=0)
    inputs = kernels.TraversalInputs(logits, root, draft.logits.flatten(0, 1), rows, draft.temperature[draft.place])
    tree, levels = verification.tree, verification.levels
    return kernels.traversal(tree, pair.proposer.kind, inputs, rng, levels=levels, active=active)


def fused_rejection(
    pair: Pair, logits: Tensor, root: Tensor, verification: Verification, rng: FusedRNG, active: Tensor | None
) -> Accepted | None:
    """Walk by kernel, as `fused_traversal`; None if it does not know the rule."""
    rule, draft = pair.rule.draw, verification.draft
    if rule not in kernels.REJECTION_RULES:
        return None
    assert draft.logits is not None
    inputs = kernels.RejectionInputs(logits, root, draft.logits, draft.place, draft.slot, draft.temperature)
    return kernels.rejection_walk(verification.tree, rule, inputs, rng, levels=verification.levels, active=active)
