"""The acceptance of one step on the device: by the pair's rule, or with the target's own draws."""

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.acceptance import Accepted, Children, traversal, walk
from vllm_adaptive_tree.engine.v2.drafts import DraftProbs
from vllm_adaptive_tree.engine.v2.kernel_dispatch import draw_of, fused_rejection, fused_traversal, fused_walk
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import TreeBatch


def accept(
    pair: Pair,
    target: Target,
    tree: TreeBatch,
    draft: DraftProbs,
    rng: RandomSource,
    from_target: np.ndarray,
    *,
    levels: int,
) -> Accepted:
    """Walk R trees.

    Args:
        from_target: [R] bool on the host: walk with the target's own draws, whatever the rule.
        levels: the largest depth of a tree.
    """

    def walked() -> Accepted:
        return fused_walk(target, tree, rng, levels=levels) or walk(
            tree, lambda node, active: (target.draw(node), torch.ones_like(active)), levels=levels
        )

    if from_target.all():
        return walked()
    own = async_tensor_h2d(from_target, device=tree.tokens.device) if from_target.any() else None
    among = None if own is None else ~own

    def mixed(found: Accepted) -> Accepted:
        if own is None:
            return found
        return Accepted(*(torch.where(own[:, None], one, other) for one, other in zip(walked(), found, strict=True)))

    rule = draw_of(pair, rng)
    if rule is None:
        found = fused_traversal(pair, target, tree, draft, rng, levels=levels, among=among) or traversal(
            tree,
            pair.proposer.kind,
            lambda node, active: target.probs(node),
            draft.after,
            rng,
            levels=levels,
            most=pair.most,
            among=among,
        )
        return mixed(found)
    at_once = fused_rejection(pair, target, tree, draft, rng, levels=levels, among=among)
    if at_once is not None:
        return mixed(at_once)

    def draw_by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        q, planned = draft.after(node)
        children = Children(tree.children(node, pair.most), planned, pair.most)
        token = rule(target.probs(node), q, children, rng.fold_in(node + 1))
        if own is not None:
            token = torch.where(own, target.draw(node), token)
        return token.clamp(min=0), torch.ones_like(active)

    return walk(tree, draw_by_rule, levels=levels)
