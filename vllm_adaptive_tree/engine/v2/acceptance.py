"""The acceptance of one step on the device: which requests the rule decides, which the target's own draws."""

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import Accepted, Children, traversal, walk
from vllm_adaptive_tree.engine.v2.drafts import Laws
from vllm_adaptive_tree.engine.v2.fused import draw_of, traversal_inputs, traverses
from vllm_adaptive_tree.engine.v2.target import Target
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import TreeBatch


def accept(
    pair: Pair, target: Target, tree: TreeBatch, laws: Laws, rng: RandomSource, own: np.ndarray, *, levels: int
) -> Accepted:
    """Walk R trees.

    Args:
        own: [R] bool on the host: walk with the target's own draws, whatever the rule.
        levels: the largest depth of a tree.
    """

    def walked() -> Accepted:
        if isinstance(rng, kernels.FusedRNG) and target.at_once:
            return kernels.walk(tree, target.draws, target.root, levels=levels)
        return walk(tree, lambda node, active: (target.draw(node), torch.ones_like(active)), levels=levels)

    if own.all():
        return walked()
    mine = async_tensor_h2d(own, device=tree.tokens.device)
    rule = draw_of(pair, rng)
    if rule is None:
        if isinstance(rng, kernels.FusedRNG) and traverses(pair, target):
            inputs = traversal_inputs(target, laws)
            found = kernels.traversal(tree, pair.proposer.kind, inputs, rng, levels=levels, among=~mine)
        else:
            found = traversal(
                tree,
                pair.proposer.kind,
                lambda node, active: target.law(node),
                laws.behind,
                rng,
                levels=levels,
                most=pair.most,
                among=~mine,
            )
        if not own.any():
            return found
        pairs = zip(walked(), found, strict=True)
        return Accepted(*(torch.where(mine[:, None], one, other) for one, other in pairs))

    def draw_by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        q, drawn = laws.behind(node)
        children = Children(tree.children(node, pair.most), drawn, pair.most)
        token = rule(target.law(node), q, children, rng.fold_in(node + 1))
        if own.any():
            token = torch.where(mine, target.draw(node), token)
        return token.clamp(min=0), torch.ones_like(active)

    return walk(tree, draw_by_rule, levels=levels)
