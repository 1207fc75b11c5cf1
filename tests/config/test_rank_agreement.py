"""Ranks that drift apart are noticed; here each rank is an object, and they meet in turn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.common import ranks as common
from vllm_adaptive_tree.engine.v2 import rank_agreement
from vllm_adaptive_tree.engine.v2.rank_agreement import EVERY, RankAgreement, checksum
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.trees import TreeBatch


def step(seed: int) -> tuple[TreeBatch, Accepted]:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(0, 9, (3, 5), generator=generator) for _ in range(5)]
    return TreeBatch(*numbers[:3], torch.zeros(3, 5)), Accepted(*numbers[3:])


def ranks(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[list[RankAgreement], list[Any]]:
    """And what each has said; the last one to speak compares."""
    said: list[Any] = []

    def objects_of_all(mine: Any) -> list[Any]:
        said.append(mine)
        return said[-count:] if len(said) % count == 0 else [mine] * count

    monkeypatch.setattr(rank_agreement, "get_tp_group", lambda: SimpleNamespace(world_size=count))
    monkeypatch.setattr(rank_agreement, "objects_of_all", objects_of_all)
    return [RankAgreement() for _ in range(count)], said


PARTS = ("tokens", "parent", "accepted", "nodes")


@pytest.mark.parametrize("part", [None, *PARTS])
def test_a_fault_on_one_rank(part: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    both, said = ranks(monkeypatch, 2)
    noticed = None
    for number in range(1, EVERY + 4):
        for rank, one in enumerate(both):
            tree, accepted = step(number)
            parts = dict(zip(PARTS, (tree.tokens, tree.parent, *accepted), strict=True))
            if rank == 1 and number == EVERY and part is not None:
                parts[part][2, 1] += 1
            try:
                one.verified(tree, accepted)
            except RuntimeError as error:
                noticed = number, str(error)
    assert len(said) == 2
    if part is None:
        assert noticed is None
    else:
        assert noticed is not None
        assert noticed[0] == EVERY + 2
        assert "ranks [1]" in noticed[1]


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,), said = ranks(monkeypatch, 1)
    for number in range(2 * EVERY + 3):
        alone.verified(*step(number))
    assert not said


def test_a_checksum_sees_places() -> None:
    assert checksum(torch.tensor([1, 2])) != checksum(torch.tensor([2, 1]))
    assert checksum(torch.tensor([[1], [2]])) == checksum(torch.tensor([1, 2]))


def test_a_rank_takes_the_whole_tree_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own may have fewer nodes, since rank 0's alone follows grammars; the merge with look-ups reads depths."""

    def proposal(nodes: int) -> Proposal:
        found = TreeBatch.empty(1, 4, torch.device("cpu"))
        chain = torch.arange(4)[None]
        there = chain < nodes
        tree = TreeBatch(
            torch.where(there, 7 + chain, found.tokens),
            torch.where(there, chain - 1, found.parent),
            torch.where(there, chain + 1, found.depth),
            torch.where(there, -0.5 * (1 + chain), found.log_weight),
        )
        read = torch.where(there, chain, -1)
        return Proposal(tree, read, torch.ones(1, 5, dtype=torch.int64), 10 * read, there & (chain % 2 == 0))

    sent = list[torch.Tensor]()

    def send(tensor: torch.Tensor, src: int) -> torch.Tensor:
        sent.append(tensor)
        return tensor

    monkeypatch.setattr(common, "get_tp_group", lambda: SimpleNamespace(world_size=2, broadcast=send))
    first = common.proposal_from_rank_0(proposal(4))
    arriving = iter(sent)
    group = SimpleNamespace(world_size=2, broadcast=lambda tensor, src: next(arriving))
    monkeypatch.setattr(common, "get_tp_group", lambda: group)
    second = common.proposal_from_rank_0(proposal(2))
    for ours, theirs in zip((*second.tree, *second[1:]), (*first.tree, *first[1:]), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(second.tree.depth, proposal(4).tree.depth)
