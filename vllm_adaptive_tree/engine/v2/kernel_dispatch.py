"""Dispatch of samples and rules to Triton kernels, on devices that compile them."""

import torch
from torch import Tensor

from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import Accepted, TargetOnly
from vllm_adaptive_tree.engine.v2 import history
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafts import DraftProbs
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels import FusedRNG
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import CounterRNG


def counter_rng(seed: Tensor, position: Tensor, purpose: int) -> CounterRNG:
    return (FusedRNG if compiles(seed.device) else CounterRNG)(seed, position, purpose)


def acceptance_bytes(pair: Pair, *, requests: int, rows: int, levels: int, vocabulary: int, size: int) -> int:
    """Most bytes that accepting trees takes at once: logits [rows, V] of numbers of `size` bytes, processed ones of
    float32, those that stand in their windows meanwhile, the bits of grammars, and what the kernels of the pair's rule
    write."""
    scratch = 0
    if pair.rule is not TargetOnly:
        scratch = 2 * requests
    if pair.rule.draw is None:
        scratch = requests + 2 * levels * min(kernels.requests_at_once(levels, vocabulary, 4), requests)
    windows = min(history.MOST_BYTES, 4 * rows * vocabulary)
    return vocabulary * (rows * (size + 4) + 4 * scratch) + windows + 4 * rows * -(-vocabulary // 32)


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
    draft, tree, levels = verification.draft, verification.tree, verification.levels
    draft_logits, place = _draft_logits(draft)
    rows = place[:, None] * draft_logits.shape[1] + draft.slot.clamp(min=0)
    temperature, chosen = draft.temperature[draft.place], verification.chosen
    inputs = kernels.TraversalInputs(logits, root, draft_logits.flatten(0, 1), rows, temperature, chosen)
    return kernels.traversal(tree, pair.proposer.kind, inputs, rng, levels=levels, active=active)


def fused_rejection(
    pair: Pair, logits: Tensor, root: Tensor, verification: Verification, rng: FusedRNG, active: Tensor | None
) -> Accepted | None:
    """Walk by kernel, as `fused_traversal`; None if it does not know the rule."""
    rule, draft = pair.rule.draw, verification.draft
    if rule not in kernels.REJECTION_RULES:
        return None
    draft_logits, place = _draft_logits(draft)
    rows = draft_logits, place, draft.slot, draft.num_planned, draft.temperature
    inputs = kernels.RejectionInputs(logits, root, *rows)
    how = {"levels": verification.levels, "most": pair.most}
    return kernels.rejection_walk(verification.tree, rule, inputs, rng, **how, active=active)


def _draft_logits(draft: DraftProbs) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] and places [R] in them."""
    if draft.logits is None:  # of the draft's type, or a kernel would be compiled again in service
        return draft.unread, torch.zeros_like(draft.place)
    return draft.logits, draft.place
