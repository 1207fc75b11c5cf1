"""Muon against PyTorch's own, which rounds to bfloat16."""

import pytest
import torch

from vllm_adaptive_tree.heads.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (12, 12)])
def test_it_steps_as_pytorch_s(shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    one = Muon([ours], lr=0.1, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape, generator=draw)
        theirs.grad = ours.grad.clone()
        one.step()
        other.step()
    assert (ours - theirs).norm() < 0.03 * (theirs - 1).norm()
    other.load_state_dict(one.state_dict() | {"param_groups": other.state_dict()["param_groups"]})


def test_an_update_is_nearly_orthogonal() -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(6, 30)))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5
    assert orthogonal(torch.zeros(3, 4)).equal(torch.zeros(3, 4))
