"""Which samples and rules run as Triton kernels: all that have one, on devices that compile them."""

from torch import Tensor

from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.acceptance.legality import Draw
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafts import DraftProbs
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.kernels import FUSED_RULES, FusedRNG
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import CounterRNG, RandomSource
from vllm_adaptive_tree.trees import TreeBatch


def counter_rng(seed: Tensor, position: Tensor, purpose: int) -> CounterRNG:
    return (FusedRNG if compiles(seed.device) else CounterRNG)(seed, position, purpose)


def draw_of(pair: Pair, rng: RandomSource) -> Draw | None:
    """The pair's rule, which may overwrite its p and q."""
    rule = pair.rule.draw
    return FUSED_RULES.get(rule, rule) if rule is not None and isinstance(rng, FusedRNG) else rule


def fused_walk(target: Target, tree: TreeBatch, rng: RandomSource, *, levels: int) -> Accepted | None:
    """The walk with the target's own draws; None without a kernel for it."""
    if not isinstance(rng, FusedRNG) or not target.at_once:
        return None
    return kernels.walk(tree, target.draws, target.root, levels=levels)


def fused_traversal(
    pair: Pair,
    target: Target,
    tree: TreeBatch,
    draft: DraftProbs,
    rng: RandomSource,
    *,
    levels: int,
    among: Tensor | None,
) -> Accepted | None:
    """None if the kernel does not know these children, or the rows of the target cannot be processed at once."""
    if not isinstance(rng, FusedRNG) or not target.at_once or pair.proposer.kind not in kernels.TRAVERSAL_KINDS:
        return None
    assert draft.logits is not None
    rows = draft.place[:, None] * draft.logits.shape[1] + draft.slot.clamp(min=0)
    inputs = kernels.TraversalInputs(
        target.processed, target.root, draft.logits.flatten(0, 1), rows, draft.temperature[draft.place]
    )
    return kernels.traversal(tree, pair.proposer.kind, inputs, rng, levels=levels, among=among)


def fused_rejection(
    pair: Pair,
    target: Target,
    tree: TreeBatch,
    draft: DraftProbs,
    rng: RandomSource,
    *,
    levels: int,
    among: Tensor | None,
) -> Accepted | None:
    """None if the kernel does not know the rule, or the rows of the target cannot be processed at once."""
    rule = pair.rule.draw
    if not isinstance(rng, FusedRNG) or not target.at_once or rule not in kernels.REJECTION_RULES:
        return None
    assert draft.logits is not None
    places = draft.place, draft.slot, draft.temperature
    inputs = kernels.RejectionInputs(target.processed, target.root, draft.logits, *places)
    return kernels.rejection_walk(tree, rule, inputs, rng, levels=levels, among=among)
