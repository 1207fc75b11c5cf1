from itertools import combinations

import pytest
import torch
from torch import Tensor

from benchmarks.papers import optimal
from benchmarks.papers.optimal import (
    greedy_multi_draft_acceptance,
    joint_hub,
    joint_iid,
    joint_without_replacement,
    k_seq_acceptance,
    optimal_acceptance,
    optimal_acceptance_lp,
    rrs_acceptance,
    spechub_acceptance,
    target_only_acceptance,
)

Joint = dict[tuple[int, ...], float]
SEEDS = pytest.mark.parametrize("seed", range(30))


def laws(seed: int) -> tuple[Tensor, Tensor]:
    """p and q [V], V = 3..5, from nearly one-hot to nearly uniform; a third of the p lack a token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3 + seed % 3, generator=generator, dtype=torch.float64) * (0.3, 1.0, 3.0)[seed // 3 % 3]
    if seed % 3 == 1:
        logits[0, seed % 4] = -torch.inf
    p, q = logits.softmax(-1)
    return p, q


def over_subsets(p: Tensor, joint: Joint) -> float:
    """1 + min over all H of p(H) - Pr(all drafts in H): the program's dual, without a solver."""
    subsets = [set(h) for size in range(len(p) + 1) for h in combinations(range(len(p)), size)]
    return 1 + min(p[sorted(h)].sum().item() - sum(m for t, m in joint.items() if h.issuperset(t)) for h in subsets)


def one_after_another(p: Tensor, d: Tensor, k: int, *, replace: bool) -> float:
    """Acceptance of recursive rejection sampling by enumeration of the drafts, its definition."""
    if k == 0:
        return 0.0
    residual = (p - d).clamp(min=0)
    residual = residual / residual.sum().clamp(min=1e-300)
    total = 0.0
    for x in range(len(p)):
        accept = min(1.0, (p[x] / d[x]).item())
        rest = d if replace else d.index_fill(0, torch.tensor(x), 0.0)
        later = one_after_another(residual, rest / rest.sum(), k - 1, replace=replace) if accept < 1 else 0.0
        total += d[x].item() * (accept + (1 - accept) * later)
    return total


def rrsw_acceptance(p: Tensor, q: Tensor) -> float:
    """Two drafts without replacement, over all first drafts at once."""
    residual = (p - q).clamp(min=0)
    second = q.expand(len(q), -1).clone().fill_diagonal_(0.0)
    second = second / second.sum(1, keepdim=True)  # [V, V]: row: first draft
    accepted = torch.minimum(residual / residual.sum(), second).sum(1)
    return (torch.minimum(p, q).sum() + ((q - p).clamp(min=0) * accepted).sum()).item()


def closed(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


@SEEDS
@pytest.mark.parametrize("k", [1, 2, 3])
def test_closed_optimum_iid(seed, k):
    p, q = laws(seed)
    assert optimal_acceptance(p, q, k, "iid") == closed(over_subsets(p, joint_iid(q, k)))


@SEEDS
def test_closed_optimum_without_replacement(seed):
    p, q = laws(seed)
    assert optimal_acceptance(p, q, 2, "without_replacement") == closed(
        over_subsets(p, joint_without_replacement(q, 2))
    )


@SEEDS
def test_linear_program(seed):
    pytest.importorskip("scipy")
    p, q = laws(seed)
    joints = [joint_iid(q, 1), joint_iid(q, 2), joint_iid(q, 3), joint_without_replacement(q, 2), joint_hub(q)]
    for joint in [*joints, joint_without_replacement(q, 3)]:
        assert optimal_acceptance_lp(p, joint) == closed(over_subsets(p, joint))
    for k in (1, 2, 3):
        assert optimal_acceptance_lp(p, joint_iid(q, k)) == closed(optimal_acceptance(p, q, k, "iid"))
    without = optimal_acceptance(p, q, 2, "without_replacement")
    assert optimal_acceptance_lp(p, joint_without_replacement(q, 2)) == closed(without)
    assert optimal_acceptance_lp(p, joint_hub(q)) == closed(spechub_acceptance(p, q))
    fixed = {tuple(q.topk(2).indices.tolist()): 1.0}
    assert optimal_acceptance_lp(p, fixed) == closed(target_only_acceptance(p, *fixed))


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(optimal.importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install scipy"):
        optimal_acceptance_lp(torch.ones(1), {(0,): 1.0})


@pytest.mark.parametrize(("k", "kind"), [(3, "without_replacement"), (1, "without_replacement"), (2, "hub")])
def test_no_closed_form(k, kind):
    with pytest.raises(ValueError, match="optimal_acceptance_lp"):
        optimal_acceptance(*laws(0), k, kind)


@SEEDS
def test_joint_laws(seed):
    _, q = laws(seed)
    joints = {"iid": joint_iid(q, 3), "without": joint_without_replacement(q, 3), "hub": joint_hub(q)}
    for joint in joints.values():
        first = torch.zeros_like(q)
        for drafts, mass in joint.items():
            first[drafts[0]] += mass
        torch.testing.assert_close(first, q)
    assert all(len(set(drafts)) == 3 for drafts in joints["without"])
    assert all(q.argmax().item() in drafts and len(set(drafts)) == 2 for drafts in joints["hub"])
    a, b, c = q.tolist()[:3]
    assert joints["iid"][0, 1, 0] == closed(a * b * a)
    assert joints["without"][0, 2, 1] == closed(a * c / (1 - a) * b / (1 - a - c))


@SEEDS
def test_recursive_rejection_sampling(seed):
    p, q = laws(seed)
    for k in (1, 2, 3):
        assert rrs_acceptance(p, q, k) == closed(one_after_another(p, q, k, replace=True))
    assert rrsw_acceptance(p, q) == closed(one_after_another(p, q, 2, replace=False))


@SEEDS
def test_one_draft_is_speculative_sampling(seed):
    p, q = laws(seed)
    overlap = closed(torch.minimum(p, q).sum().item())
    assert optimal_acceptance(p, q, 1, "iid") == overlap
    assert rrs_acceptance(p, q, 1) == overlap
    assert k_seq_acceptance(p, q, 1) == overlap
    assert greedy_multi_draft_acceptance(p, q, 1) == overlap


@SEEDS
def test_hub(seed):
    p, q = laws(seed)
    assert spechub_acceptance(p, q) == closed(over_subsets(p, joint_hub(q)))
    assert spechub_acceptance(p, q) == closed(greedy_multi_draft_acceptance(p, q, 2))


@SEEDS
def test_greedy_multi_draft_is_optimal_for_its_drafts(seed):
    p, q = laws(seed)
    best = q.topk(2).indices.tolist()
    r = q.index_fill(0, torch.tensor(best), 0.0)
    joint = {(*best, y): mass for y, mass in enumerate((r / r.sum()).tolist()) if mass > 0}
    assert greedy_multi_draft_acceptance(p, q, 3) == closed(over_subsets(p, joint))


@SEEDS
def test_orders(seed):
    p, q = laws(seed)
    slack = 1e-12
    for k in (1, 2, 3):
        iid = optimal_acceptance(p, q, k, "iid")
        assert rrs_acceptance(p, q, k) <= iid + slack
        assert (1 - 1 / torch.e) * iid <= k_seq_acceptance(p, q, k) + slack
        assert k_seq_acceptance(p, q, k) <= iid + slack
    without = optimal_acceptance(p, q, 2, "without_replacement")
    assert rrsw_acceptance(p, q) <= without + slack
    assert optimal_acceptance(p, q, 2, "iid") <= without + slack
    alpha = torch.minimum(p, q).sum().item()
    if q.max() >= (1 - alpha) / (2 - alpha):  # SpecHub, theorem 3
        assert rrs_acceptance(p, q, 2) <= spechub_acceptance(p, q) + slack


@SEEDS
def test_a_likely_hub_beats_the_optimum_of_independent_drafts(seed):
    """SpecHub, theorem 4: with q(hub) of 1/2 or more."""
    p, q = laws(seed)
    q = 0.5 * q + 0.5 * torch.nn.functional.one_hot(q.argmax(), len(q))
    assert optimal_acceptance(p, q, 2, "iid") <= spechub_acceptance(p, q) + 1e-12


def test_equal_laws_are_always_accepted():
    _, q = laws(2)
    for k in (1, 2, 3):
        found = [rrs_acceptance(q, q, k), k_seq_acceptance(q, q, k), greedy_multi_draft_acceptance(q, q, k)]
        assert [*found, optimal_acceptance(q, q, k, "iid")] == pytest.approx([1.0] * 4, abs=1e-9)


def test_target_only_counts_a_child_once():
    assert target_only_acceptance(torch.tensor([0.5, 0.25, 0.25]), [2, 0, 2]) == 0.75


# SpecHub, appendix D: (T, lambda) -> RRS, RRSw, OTM, OTMw, Hub for two drafts; our figures, the paper's are within 0.05
TOY_TABLE = {
    (0.1, 0.7): (0.623, 0.735, 0.632, 0.756, 0.753),
    (0.1, 0.5): (0.327, 0.440, 0.330, 0.447, 0.442),
    (0.25, 0.7): (0.716, 0.754, 0.763, 0.816, 0.805),
    (0.25, 0.5): (0.450, 0.493, 0.468, 0.521, 0.492),
    (0.5, 0.7): (0.807, 0.813, 0.902, 0.913, 0.840),
    (0.5, 0.5): (0.633, 0.641, 0.690, 0.703, 0.629),
}


def toy_means(temperature: float, mix: float, *, pairs: int) -> list[float]:
    """Mean acceptance of RRS, RRSw, OTM, OTMw and SpecHub over random logits of 50 tokens."""
    u = torch.randn(pairs, 2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for u_p, u_q in u:
        p, q = (u_p / temperature).softmax(0), ((mix * u_p + (1 - mix) * u_q) / temperature).softmax(0)
        found.append(
            (
                rrs_acceptance(p, q, 2),
                rrsw_acceptance(p, q),
                optimal_acceptance(p, q, 2, "iid"),
                optimal_acceptance(p, q, 2, "without_replacement"),
                spechub_acceptance(p, q),
            )
        )
    return torch.tensor(found).mean(0).tolist()


@pytest.mark.parametrize(("setting", "expected"), TOY_TABLE.items())
def test_toy_table(setting, expected):
    means = toy_means(*setting, pairs=100)
    assert means == pytest.approx(expected, abs=0.05)
    rrs, rrsw, otm, otmw, hub = means
    assert otm >= rrs
    assert otmw >= rrsw
    assert otmw >= otm
    if setting[0] == 0.5:
        assert otm > hub
    if setting[1] == 0.7 or setting[0] == 0.1:
        assert hub > rrsw
