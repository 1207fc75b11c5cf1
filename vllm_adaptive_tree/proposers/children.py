"""The children of a node, by kind."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.vocab_ops import joint_topk, topk_tokens


def draw_children(kind: Kind, q: Tensor, drawn: Tensor, most: int, rng: RandomSource, greedy: Tensor | None) -> Tensor:
    """Tokens [R, W, most] of the children of W nodes, in the order in which a rule has to test them; -1: none.

    Args:
        q: draft law [R, W, V]; may be written to while drawing, and is as before afterwards.
        drawn: [R, W] how many children each node gets, decided before any is drawn; at most `most`.
        rng: one stream per node, [R, W].
        greedy: [R] bool; these requests get the best tokens whatever the kind.
    """
    most, best = min(most, q.shape[-1]), None
    match kind:
        case "one_hot":
            tokens = top(q, most)
        case "without_replacement":
            tokens = rng.sample_without_replacement(q, most)
        case "iid":
            tokens = torch.stack([rng.sample(q) for _ in range(most)], -1)
        case "hub_pair":
            best = topk_tokens(q, 2)
            hub, first = best[..., 0], rng.sample(q)
            other = _choose_off(q, best, torch.ones_like(hub), rng)
            tokens = torch.stack([first, torch.where(first == hub, other, hub)], -1)
        case "top_k_plus_one":
            best = topk_tokens(q, most)
            tokens = torch.cat([_choose_off(q, best, drawn - 1, rng)[..., None], best[..., : most - 1]], -1)
    if greedy is not None and kind != "one_hot":
        found = top(q, most) if best is None else best.masked_fill(q.gather(-1, best) <= 0, -1)
        tokens = torch.where(greedy[:, None, None], found[..., : tokens.shape[-1]], tokens)
    late = torch.arange(tokens.shape[-1], device=q.device) >= drawn[..., None]
    return tokens.masked_fill(late, -1)


def _choose_off(q: Tensor, best: Tensor, count: Tensor, rng: RandomSource) -> Tensor:
    """A token that is none of the first `count` of the `best` [..., K]; drawn as from `acceptance.hub.without_best`."""
    gone = torch.arange(best.shape[-1], device=q.device) < count[..., None]
    q = q.contiguous()
    chance = q.gather(-1, best)
    q.scatter_(-1, best, chance.masked_fill(gone, 0.0))  # a copy of q would cost more than all the rest
    token = rng.sample(q).clamp(max=q.shape[-1] - 1)
    possible = q.gather(-1, token[..., None])[..., 0] > 0
    q.scatter_(-1, best, chance)
    other = best.gather(-1, count.clamp(min=0, max=best.shape[-1] - 1)[..., None])[..., 0]
    return torch.where(possible, token, other)


def top(q: Tensor, most: int) -> Tensor:
    """The `most` largest tokens of q [R, W, V] by value: [R, W, most], -1 where q is zero."""
    value, _, token = joint_topk(q[:, :, None], torch.zeros_like(q[:, :, :1]), most)
    return token.masked_fill(value <= 0, -1)
