"""The pure rooms never wait for a device: they read no value, and no shape depends on one."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_adaptive_tree.acceptance import target_only
from vllm_adaptive_tree.proposers import Frontier, OptTree, draft_tree
from vllm_adaptive_tree.trees import TreeBatch

from .toys import ToyLM, grow_trees

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_}


class HostSyncError(Exception):
    pass


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        masks = packet in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        to_host = packet is aten._to_copy and kwargs.get("device") == torch.device("cpu")
        if packet in WAITS or masks or to_host:
            raise HostSyncError(str(func))
        devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0}
        assert len(devices) <= 1, f"{func} mixes {devices}"
        return func(*args, **kwargs)


# On the CPU the code runs on values; a meta tensor stands for a device's, where copies to the host can be seen.
DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@DEVICES
@pytest.mark.parametrize("name", ["item", "bool", "int", "nonzero", "mask", "assign", "unique", "equal"])
def test_the_mode_sees(name, device):
    x = torch.arange(4.0, device=device)
    offenders: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "bool": lambda: bool((x > 1).any()),
        "int": lambda: int(x.sum()),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 1],
        "assign": lambda: x.index_put_((x > 1,), x[0]),
        "unique": lambda: x.unique(),
        "equal": lambda: torch.equal(x, x),
    }
    with NoHostSync(), pytest.raises(HostSyncError):
        offenders[name]()


@pytest.mark.parametrize("copy", [Tensor.cpu, Tensor.tolist])
def test_the_mode_sees_copies_to_the_host(copy):
    with NoHostSync(), pytest.raises(HostSyncError):
        copy(torch.ones(2, device="meta"))


def tree_on(device: str) -> TreeBatch:
    tree = grow_trees([ToyLM.random(3, 3, seed=seed) for seed in range(2)], nodes=5, max_depth=3)
    return TreeBatch(*(column.to(device) for column in tree))


class BlindDrafter:
    def __init__(self, logits: Tensor):
        self.logits = logits  # [R, W, V]

    def grow(self, tokens: Tensor, parent: Tensor, state: None) -> tuple[Tensor, None]:
        return self.logits[:, : tokens.shape[1]], state


@DEVICES
def test_opt_tree(device):
    root, below, temperature = (x.to(device) for x in (torch.randn(2, 9), torch.randn(2, 6, 9), torch.ones(2)))
    widths = iter([6, 4, 5])

    def cut(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
        width = next(widths)
        return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), True

    proposer = OptTree(max_depth=4, threshold=0.1)
    with NoHostSync():
        tree = draft_tree(proposer, BlindDrafter(below), root, None, nodes=6, temperature=temperature, agree=cut)
    assert [(column.shape, column.device.type) for column in tree] == [((2, 6), device)] * 4


@DEVICES
def test_tree_batch(device):
    tree, two = tree_on(device), torch.tensor([1, 2]).to(device)
    with NoHostSync():
        found = tree.cut(two).child(two, two)
    assert found.device.type == device


@DEVICES
def test_target_only(device):
    tree = tree_on(device)
    law = torch.rand(6, 2, 3).to(device)  # [N + 1, R, V]
    requests = torch.arange(2).to(device)
    with NoHostSync():
        accepted = target_only(
            tree, lambda node, active: (law[node + 1, requests].argmax(1), torch.ones_like(active)), levels=3
        )
    assert accepted.tokens.shape == (2, 4)
    assert accepted.tokens.device.type == device


def test_the_pure_rooms_do_not_import_vllm():
    rooms = ", ".join(f"vllm_adaptive_tree.{room}" for room in ("trees", "proposers", "acceptance", "config"))
    check = f"import sys, {rooms}; sys.exit(', '.join(m for m in sys.modules if m.split('.')[0] == 'vllm') or None)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
