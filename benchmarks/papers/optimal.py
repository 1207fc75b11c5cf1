"""Acceptance rates at one node: the optimum over all lossless rules, and closed forms of the rules in this package.

For tests and research on small vocabularies, not for the step path. Distributions p (target) and q (draft) are [V]
tensors; results are float64. The acceptance rate is the probability that the emitted token is one of the k drafts.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Drafts = tuple[int, ...]
HALVINGS = 60


def joint_iid(q: Tensor, k: int) -> dict[Drafts, float]:
    """Joint distribution of k drafts, each from q [V]; tuples of probability 0 are left out."""
    return _joint(q, k, replace=True)


def joint_without_replacement(q: Tensor, k: int) -> dict[Drafts, float]:
    """Joint distribution of k drafts from q [V] without replacement, in the order drawn; q has at least k tokens."""
    return _joint(q, k, replace=False)


def joint_hub(q: Tensor) -> dict[Drafts, float]:
    """Joint distribution of SpecHub's pairs (arXiv 2411.05289): (x, a) with x ~ q, or (a, x) with x ~ q without a.

    a = argmax q.
    """
    q, a = q.double(), int(q.argmax())
    r = _without(q)[a].tolist()
    others = [x for x, mass in enumerate(r) if mass > 0]
    return {(x, a): q[x].item() for x in others} | {(a, x): q[a].item() * r[x] for x in others}


def optimal_acceptance_lp(p: Tensor, joint: Mapping[Drafts, float]) -> float:
    """The highest acceptance rate of any lossless rule for drafts of a given joint distribution (optimal transport with
    membership cost, SpecTr, arXiv 2310.15141; the simplified linear program of SpecHub, arXiv 2411.05289).

    Maximises the mass pi(t, x) of tuples t that emit their token x, at most p(x) for x and joint[t] for t.

    Args:
        p: [V], the target's distribution.
        joint: the distribution of the k-tuple of drafts.

    Raises:
        ImportError: without SciPy.
    """
    linprog, coo_array = _scipy("optimize").linprog, _scipy("sparse").coo_array
    pairs = [(t, x) for t, drafts in enumerate(joint) for x in sorted(set(drafts))]
    rows = [x for _, x in pairs] + [len(p) + t for t, _ in pairs]
    columns = [*range(len(pairs))] * 2
    spent = coo_array(([1.0] * len(rows), (rows, columns)), shape=(len(p) + len(joint), len(pairs)))
    solved = linprog([-1.0] * len(pairs), A_ub=spent, b_ub=[*p.double().tolist(), *joint.values()], method="highs")
    assert solved.success, solved.message
    return -float(solved.fun)


def optimal_acceptance(p: Tensor, q: Tensor, k: int, kind: Literal["iid", "without_replacement"]) -> float:
    """`optimal_acceptance_lp` in closed form, 1 + min over H of p(H) - Pr(all drafts in H) (Hu et al., arXiv
    2502.18779): the best H is a prefix of the tokens by descending q / p.

    Args:
        p, q: [V].
        k: number of drafts; 2 for drafts without replacement.

    Raises:
        ValueError: no closed form for this kind and k.
    """
    p, q = p.double(), q.double()
    order = torch.where(q > 0, q / p, 0.0).argsort(descending=True)
    p, q = p[order], q[order]
    if kind == "iid":
        inside = q.cumsum(0) ** k
    elif kind == "without_replacement" and k == 2:
        pair = q[:, None] * _without(q)  # [V, V]: first and second draft
        inside = (pair.tril() + pair.triu().T).sum(1).cumsum(0)
    else:
        raise ValueError(f"no closed form for {k} drafts of kind {kind!r}: use optimal_acceptance_lp")
    return 1 + min(0.0, (p.cumsum(0) - inside).min().item())


def target_only_acceptance(p: Tensor, children: Sequence[int]) -> float:
    """p(children), optimal for children that are not sampled (OPT-Tree, arXiv 2406.17276; EAGLE-2, 2406.16858)."""
    return p.double()[sorted(set(children))].sum().item()


def rrs_acceptance(p: Tensor, q: Tensor, k: int) -> float:
    """1 - prod (1 - b_i), b_i = sum min(p_i, q), p_{i+1} = norm((p_i - q)+): k drafts from q with replacement
    (SpecInfer, arXiv 2305.09781; MCSD, 2401.06706)."""
    p, q = p.double(), q.double()
    rejected = 1.0
    for _ in range(k):
        residual = (p - q).clamp(min=0)
        mass = residual.sum()  # 1 - b
        if mass <= 0:
            return 1.0
        rejected *= mass.item()
        p = residual / mass
    return 1 - rejected


def k_seq_acceptance(p: Tensor, q: Tensor, k: int) -> float:
    """1 - (1 - b)^k, b = sum min(p / rho, q), where 1 - (1 - b)^k = rho b: k drafts from q (SpecTr, arXiv 2310.15141).

    Counts the tests only; sampling from the residual may still hit a draft. At least 1 - 1/e of the optimum.
    """
    p, q = p.double(), q.double()

    def passed(rho: float) -> float:
        return min(1.0, torch.minimum(p / rho, q).sum().item())

    low, high = 1.0, float(k)
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        b = passed(rho)
        low, high = (low, rho) if 1 - (1 - b) ** k <= rho * b else (rho, high)
    return float(1 - (1 - passed(high)) ** k)


def greedy_multi_draft_acceptance(p: Tensor, q: Tensor, k: int) -> float:
    """p(T) + sum outside T of min(p, r): the k - 1 best tokens T of q, and one from r = norm(q outside T).

    Hu et al., arXiv 2502.18779.
    """
    p, q = p.double(), q.double()
    assert _tokens(q) >= k
    best = q.argsort(descending=True, stable=True)[: k - 1]
    off = q.index_fill(0, best, 0.0)
    return (p[best].sum() + torch.minimum(p, off / off.sum()).index_fill(0, best, 0.0).sum()).item()


def spechub_acceptance(p: Tensor, q: Tensor) -> float:
    """p(a) + sum over x != a of min(p(x), q(x) / (1 - q(a))), a = argmax q: two drafts (SpecHub, arXiv 2411.05289)."""
    a = int(q.argmax())
    p, r = p.double(), _without(q.double())[a]
    return (p[a] + torch.minimum(p, r).sum()).item()


def _joint(q: Tensor, k: int, *, replace: bool) -> dict[Drafts, float]:
    assert replace or _tokens(q) >= k
    joint: dict[Drafts, float] = {(): 1.0}
    for _ in range(k):
        longer = {}
        for drafts, mass in joint.items():
            probs = q.double() if replace else q.double().index_fill(0, torch.tensor(drafts, dtype=torch.int64), 0.0)
            for x, conditional in enumerate((probs / probs.sum()).tolist()):
                if conditional > 0:
                    longer[*drafts, x] = mass * conditional
        joint = longer
    assert math.isclose(sum(joint.values()), 1)
    return joint


def _without(q: Tensor) -> Tensor:
    """[V, V]: row x is q conditioned on the token not being x; renormalised, since 1 - q(x) might cancel to 0."""
    assert _tokens(q) >= 2
    off = q.expand(len(q), -1).clone().fill_diagonal_(0.0)
    return off / off.sum(1, keepdim=True)


def _tokens(q: Tensor) -> int:
    return int((q > 0).sum())


def _scipy(name: str) -> Any:
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise ImportError("optimal_acceptance_lp needs SciPy: pip install scipy") from error
