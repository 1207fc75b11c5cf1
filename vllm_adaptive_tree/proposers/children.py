"""Drawing the children of a node, for every kind."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.vocab_ops import joint_topk, topk_tokens


def draw_children(
    kind: Kind, q: Tensor, num_planned: Tensor, limit: int, rng: RandomSource, greedy: Tensor | None
) -> Tensor:
    """Tokens [R, W, limit] of the children of W nodes, in the order in which a rule must test them; -1 pads.

    Args:
        q: draft distribution [R, W, V]; overwritten temporarily, restored on return.
        num_planned: [R, W] children of each node, decided before any is drawn; at most `limit`.
        rng: one stream per node, [R, W].
        greedy: [R] bool; these requests get the top tokens, whatever the kind.
    """
    limit, best = min(limit, q.shape[-1]), None
    if greedy is not None and greedy.device.type == "cpu":  # a look is free there, draws and sorts are not
        if kind in ("without_replacement", "iid") and greedy.numpy().all():
            kind = "one_hot"
        elif not greedy.numpy().any():
            greedy = None
    match kind:
        case "one_hot":
            tokens = top(q, limit)
        case "without_replacement":
            tokens = rng.sample_without_replacement(q, limit)
        case "iid":
            tokens = torch.stack([rng.sample(q) for _ in range(limit)], -1)
        case "hub_pair":
            best = topk_tokens(q, 2)
            hub, first = best[..., 0], rng.sample(q)
            other = _sample_other(q, best, torch.ones_like(hub), rng)
            tokens = torch.stack([first, torch.where(first == hub, other, hub)], -1)
        case "top_k_plus_one":
            best = topk_tokens(q, limit)
            tokens = torch.cat([_sample_other(q, best, num_planned - 1, rng)[..., None], best[..., : limit - 1]], -1)
    if greedy is not None and kind != "one_hot":
        best_tokens = top(q, limit) if best is None else best.masked_fill(q.gather(-1, best) <= 0, -1)
        tokens = torch.where(greedy[:, None, None], best_tokens[..., : tokens.shape[-1]], tokens)
    surplus = torch.arange(tokens.shape[-1], device=q.device) >= num_planned[..., None]
    return tokens.masked_fill(surplus, -1)


def _sample_other(q: Tensor, best: Tensor, count: Tensor, rng: RandomSource) -> Tensor:
    """A token other than the first `count` of `best` [..., K], distributed as `acceptance.hub.without_best`."""
    excluded = torch.arange(best.shape[-1], device=q.device) < count[..., None]
    q = q.contiguous()
    chance = q.gather(-1, best)
    # in place: copying q would cost more than everything else here
    q.scatter_(-1, best, chance.masked_fill(excluded, 0.0))
    token = rng.sample(q).clamp(max=q.shape[-1] - 1)
    possible = q.gather(-1, token[..., None])[..., 0] > 0
    q.scatter_(-1, best, chance)
    other = best.gather(-1, count.clamp(min=0, max=best.shape[-1] - 1)[..., None])[..., 0]
    return torch.where(possible, token, other)


def top(q: Tensor, limit: int) -> Tensor:
    """The `limit` most probable tokens of q [R, W, V]: [R, W, limit], -1 where q is zero."""
    value, _, token = joint_topk(q[:, :, None], torch.zeros_like(q[:, :, :1]), limit)
    return token.masked_fill(value <= 0, -1)
