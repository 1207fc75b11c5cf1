"""Rules for children of which some are the draft's best tokens and one is sampled from the rest."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import (
    Children,
    Round,
    begin,
    finish,
    one_hot,
    rounding,
    subtract,
    test,
)
from vllm_adaptive_tree.noise import Noise
from vllm_adaptive_tree.rows import best_tokens


def rest(q: Tensor, best: Tensor, count: Tensor) -> Tensor:
    """q [..., V] given that the token is none of the first `count` [...] of its `best` [..., K] ones.

    Where they hold all mass, the largest other token.
    """
    place = torch.arange(best.shape[-1], device=q.device) < count[..., None]
    off = q.scatter(-1, best, torch.where(place, 0.0, q.gather(-1, best)))
    mass = off.sum(-1, keepdim=True)
    marked = off.scatter(-1, best, torch.where(place, -1.0, q.gather(-1, best)))
    other = torch.zeros_like(q).scatter(-1, marked.argmax(-1, keepdim=True), 1.0)
    return torch.where(mass > 0, off / mass.clamp(min=torch.finfo(q.dtype).tiny), other)


def off_hub(q: Tensor) -> Tensor:
    """q [..., V] given that the token is not its largest."""
    hub = q.argmax(-1, keepdim=True)
    return rest(q, hub, torch.ones_like(hub[..., 0]))


def spechub(p: Tensor, q: Tensor, children: Children, noise: Noise) -> Tensor:
    """Pairs that always hold the hub a = argmax q: (x, a) with x ~ q, or (a, x) with x ~ q without a.

    SpecHub (arXiv 2411.05289); p and q as in the paper. A single child is tested plainly.
    """
    first, second = children.tokens[:, 0], children.tokens[:, 1] if children.tokens.shape[1] > 1 else None
    if second is None:
        return finish(test(begin(p), first, q, noise), noise)
    a = q.argmax(-1)  # the first of equals
    hub = one_hot(a, q)
    pair = second >= 0
    joint = (q * hub).sum(-1, keepdim=True) * off_hub(q)  # Q(a, x)
    p1 = torch.where(hub > 0, p, (p - q).clamp(min=0))
    p2 = torch.where(hub > 0, p, (p1 - joint).clamp(min=0))
    a1 = (joint - p1).clamp(min=0).masked_fill(hub > 0, 0.0).sum(-1)  # mass of (a, x) behind the test of x
    a2 = (q - p).clamp(min=0).masked_fill(hub > 0, 0.0).sum(-1)  # mass of (x, a) behind the test of x
    p_a = p.gather(1, a[:, None])[:, 0]

    hub_first = first == a
    x = torch.where(hub_first & pair, second, first)
    law = torch.where((hub_first & pair)[:, None], joint, q)
    left = torch.where((hub_first & pair)[:, None], p1, p)
    at = x.clamp(min=0)[:, None]
    ratio = (left.gather(1, at) / law.gather(1, at))[:, 0].nan_to_num(0.0).clamp(max=1.0)
    plain = test(begin(p), torch.where(pair, -1, first), q, noise)  # where there is no pair
    took_x = noise.accept(torch.where(pair, ratio, 0.0)) & pair
    hub_left = torch.where(hub_first, p_a, (p_a - a1).clamp(min=0))
    ratio_a = (hub_left / torch.where(hub_first, a1, a2)).nan_to_num(0.0).clamp(max=1.0)
    off, mass = subtract(p2, p2 * hub)
    ratio_a = torch.where(mass <= rounding(p), 1.0, ratio_a)  # no other token is left
    took_a = noise.accept(torch.where(pair & ~took_x, ratio_a, 0.0)) & pair & ~took_x
    token = torch.where(took_x, x, torch.where(took_a, a, plain.token))
    return finish(Round(token, torch.where(pair[:, None], off, plain.p)), noise)


def greedy_multi_draft(p: Tensor, q: Tensor, children: Children, noise: Noise) -> Tensor:
    """One child y sampled from r = q off its k - 1 best tokens, then those tokens (Hu et al., arXiv 2502.18779).

    r is zero on the best tokens, so their whole mass of p survives the test of y and the draw may land on them.
    """
    r = rest(q, best_tokens(q, children.most - 1), children.drawn - 1)
    return finish(test(begin(p), children.tokens[:, 0], r, noise), noise)
