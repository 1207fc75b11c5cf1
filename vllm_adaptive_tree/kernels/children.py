"""Drawing the children of a node, for every kind, in a few launches."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.kernels.sampling import FusedRNG, put_top


def draw_children(kind: Kind, q: Tensor, num_planned: Tensor, limit: int, rng: FusedRNG, greedy: Tensor) -> Tensor:
    """Do `proposers.children.draw_children`, but for surplus children, which are not removed: tokens [R, W, limit].

    Args:
        q: [R, W, V], contiguous.
    """
    limit = min(limit, q.shape[-1])
    match kind:
        case "one_hot":
            return _best(q, limit)
        case "without_replacement":
            tokens = rng.sample_without_replacement(q, limit)
        case "iid":
            tokens = torch.stack([rng.sample(q) for _ in range(limit)], -1)
        case "hub_pair":
            best = _best(q, 2, possible=False)
            hub, first = best[..., 0], rng.sample(q)
            other = rng.sample_other(q, best, torch.ones_like(hub))
            tokens = torch.stack([first, torch.where(first == hub, other, hub)], -1)[..., :limit]
        case "top_k_plus_one":
            best = _best(q, limit, possible=False)
            other = rng.sample_other(q, best, num_planned - 1)
            tokens = torch.cat([other[..., None], best[..., : limit - 1]], -1)
    put_top(tokens, q, greedy)
    return tokens


def _best(q: Tensor, count: int, *, possible: bool = True) -> Tensor:
    """The most probable tokens [R, W, count]; -1 where q is zero, if only those that are `possible` count."""
    tokens = torch.empty((*q.shape[:-1], count), dtype=torch.int64, device=q.device)
    put_top(tokens, q, torch.ones_like(q[:, 0, 0], dtype=torch.bool), possible=possible)
    return tokens
