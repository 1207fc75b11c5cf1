"""Acceptance rules that test the children of a node: at one node of each request, in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Children
from vllm_adaptive_tree.acceptance.hub import GreedyMultiDraft, SpecHub
from vllm_adaptive_tree.acceptance.k_seq import KSeq, halvings
from vllm_adaptive_tree.acceptance.rejection import rounding_mass
from vllm_adaptive_tree.acceptance.rrs import RRS, RRSw
from vllm_adaptive_tree.acceptance.rule import Draw
from vllm_adaptive_tree.kernels.hub import greedy_multi_draft, spechub
from vllm_adaptive_tree.kernels.k_seq import k_seq
from vllm_adaptive_tree.kernels.rejection import one_by_one
from vllm_adaptive_tree.kernels.sampling import FusedRNG
from vllm_adaptive_tree.rng import RandomSource

REJECTION_RULES: dict[Draw, str] = {
    RRS.draw: "rrs",
    RRSw.draw: "rrsw",
    SpecHub.draw: "spechub",
    GreedyMultiDraft.draw: "greedy_multi_draft",
    KSeq.draw: "k_seq",
}
"""Rules that the kernels know, by name."""
BLOCK = 4096


@triton.jit
def accepted_child(
    p,  # [V], overwritten with the residual, not normalised, if none is accepted
    q,  # [V], overwritten
    token_of,  # lanes
    order,  # lanes: 1, 2, .. for the children of the node in their order, 0 for others
    count,  # of children
    planned,
    most,
    halvings,
    stream,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The child that the rule accepts at a node, -1 for none."""
    if RULE == "spechub":
        token = spechub(p, q, token_of, order, count, stream, vocabulary, TINY, ROUNDING, BLOCK)
    elif RULE == "greedy_multi_draft":
        token = greedy_multi_draft(
            p, q, token_of, order, count, planned, most, stream, vocabulary, TINY, ROUNDING, BLOCK
        )
    elif RULE == "k_seq":
        token = k_seq(p, q, token_of, order, count, halvings, stream, vocabulary, BLOCK)
    else:
        token = one_by_one(p, q, token_of, order, count, stream, vocabulary, TINY, ROUNDING, RULE == "rrs", BLOCK)
    return token


@triton.jit(
    do_not_specialize=["columns", "most", "halvings"], do_not_specialize_on_alignment=["children", "key", "planned"]
)
def _test(
    accepted,  # [R]: -1 if all are rejected
    p,  # [R, V], overwritten with the residual, not normalised
    q,  # [R, V], overwritten
    children,  # [R, K], -1 pads
    planned,  # [R]
    key,  # [R]
    columns,  # K
    most,
    halvings,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    RULE: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    token_of = tl.load(children + row * columns + lane, mask=lane < columns, other=-1)
    is_child = token_of >= 0
    order = tl.where(is_child, tl.cumsum(is_child.to(tl.int64), 0), 0)
    token = accepted_child(
        p + row * vocabulary, q + row * vocabulary, token_of, order, tl.sum(is_child.to(tl.int64), 0),
        tl.load(planned + row), most, halvings, tl.load(key + row), vocabulary, TINY, ROUNDING, RULE, BLOCK,
    )  # fmt: skip
    tl.store(accepted + row, token)


def constants(p: Tensor, rule: Draw) -> dict[str, Any]:
    """What a kernel of the rule is compiled for, by its distributions `p` [R, V]."""
    block = min(BLOCK, triton.next_power_of_2(p.shape[1]))
    limits = {"TINY": torch.finfo(p.dtype).tiny, "ROUNDING": rounding_mass(p)}
    return {**limits, "RULE": REJECTION_RULES[rule], "BLOCK": block, "num_warps": 16}


def _fused(rule: Draw) -> Draw:
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        """Apply the rule; overwrites `p` and `q` [R, V]."""
        assert isinstance(rng, FusedRNG)
        p, q, columns = p.contiguous(), q.contiguous(), children.tokens.shape[1]
        accepted = torch.empty_like(p[:, 0], dtype=torch.int64)
        if len(p):
            _test[(len(p),)](
                *(
                    accepted,
                    p,
                    q,
                    children.tokens.contiguous(),
                    children.num_planned.contiguous(),
                    rng.key.contiguous(),
                ),
                *(columns, children.max_children, halvings(columns, p.dtype), p.shape[1]),
                PADDED=triton.next_power_of_2(columns),
                **constants(p, rule),
            )
        return torch.where(accepted >= 0, accepted, rng.sample(p))

    return draw


FUSED_RULES: dict[Draw, Draw] = {rule: _fused(rule) for rule in REJECTION_RULES}
"""Rule -> its kernel version, which overwrites the distributions it is given."""
