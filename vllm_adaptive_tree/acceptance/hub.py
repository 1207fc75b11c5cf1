"""SpecHub and greedy multi-draft: some children are the draft's best tokens, one is sampled from the rest."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.acceptance.rejection import (
    Children,
    TestState,
    begin,
    finish,
    rounding_mass,
    test,
    where_rows,
)
from vllm_adaptive_tree.acceptance.rule import Rule
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.vocab_ops import topk_tokens


def without_best(q: Tensor, best: Tensor, count: Tensor) -> Tensor:
    """q [..., V] conditioned on the token not being one of the first `count` [...] of its `best` [..., K] tokens.

    If those hold all the mass: one-hot on the largest other token.
    """
    excluded = torch.arange(best.shape[-1], device=q.device) < count[..., None]
    off = q.scatter(-1, best, q.gather(-1, best).masked_fill(excluded, 0.0))
    mass = off.sum(-1, keepdim=True)
    off.div_(mass.clamp(min=torch.finfo(q.dtype).tiny))
    # if all others have mass 0, the largest is the first of them
    first = torch.arange(min(best.shape[-1] + 1, q.shape[-1]), device=q.device)
    taken = ((first[:, None] == best[..., None, :]) & excluded[..., None, :]).any(-1)  # [..., K + 1]
    other = taken.int().argmin(-1, keepdim=True)
    return off.scatter_(-1, other, torch.where(mass > 0, off.gather(-1, other), 1.0))


def without_argmax(q: Tensor) -> Tensor:
    """q [..., V] conditioned on the token not being its argmax."""
    hub = topk_tokens(q, 1)
    return without_best(q, hub, torch.ones_like(hub[..., 0]))


class SpecHub(Rule):
    """Pairs that contain the hub a = argmax q: (x, a) with x ~ q, or (a, x) with x ~ q without a.

    SpecHub (arXiv 2411.05289); p and q as in the paper. A single child gets an ordinary rejection test.
    """

    kinds = ("hub_pair",)
    most = 2

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        first, second = pad(children.tokens, (0, 2 - children.tokens.shape[1]), value=-1).unbind(1)
        a = topk_tokens(q, 1)
        p_a, q_a, zero = p.gather(1, a), q.gather(1, a), torch.zeros_like(p[:, :1])
        pair = second >= 0
        joint = without_best(q, a, torch.ones_like(first)).mul_(q_a)  # Q(a, x)
        p1 = (p - q).clamp_(min=0).scatter_(1, a, p_a)
        p2 = (p1 - joint).clamp_(min=0).scatter_(1, a, zero)  # except at the hub, where it is p
        a1 = (joint - p1).clamp_(min=0).sum(-1)  # mass of (a, x) left after the test of x
        a2 = (q - p).clamp_(min=0).scatter_(1, a, zero).sum(-1)  # mass of (x, a) left after the test of x

        a, p_a = a[:, 0], p_a[:, 0]
        hub_first = first == a
        x = torch.where(hub_first & pair, second, first)
        at = x.clamp(min=0)[:, None]
        prob = torch.where((hub_first & pair)[:, None], joint.gather(1, at), q.gather(1, at))
        left = torch.where((hub_first & pair)[:, None], p1.gather(1, at), p.gather(1, at))
        ratio = (left / prob)[:, 0].nan_to_num(0.0).clamp(max=1.0)
        plain = test(begin(p), torch.where(pair, -1, first), q, rng)  # for a single child
        took_x = rng.accept(torch.where(pair, ratio, 0.0)) & pair
        hub_left = torch.where(hub_first, p_a, (p_a - a1).clamp(min=0))
        ratio_a = (hub_left / torch.where(hub_first, a1, a2)).nan_to_num(0.0).clamp(max=1.0)
        ratio_a = torch.where(p2.sum(-1) <= rounding_mass(p), 1.0, ratio_a)  # no residual is left
        took_a = rng.accept(torch.where(pair & ~took_x, ratio_a, 0.0)) & pair & ~took_x
        token = torch.where(took_x, x, torch.where(took_a, a, plain.token))
        return finish(TestState(token, where_rows(pair, p2, plain.p)), rng)


class GreedyMultiDraft(Rule):
    """One child y sampled from r = q without its k - 1 best tokens, then those tokens (Hu et al., arXiv 2502.18779).

    r is zero on the best tokens, so all of their mass in p survives the test of y and sampling may hit them.
    """

    kinds = ("top_k_plus_one",)

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        r = without_best(q, topk_tokens(q, children.max_children - 1), children.num_planned - 1)
        return finish(test(begin(p), children.tokens[:, 0], r, rng), rng)
