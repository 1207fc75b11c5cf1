"""The pure rooms never wait for a device: they read no value, and no shape depends on one."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.oracles.growth import grow_trees
from vllm_adaptive_tree.acceptance import RULES, Children, Kind, traversal, walk
from vllm_adaptive_tree.budget import top_nodes
from vllm_adaptive_tree.drafters import ByDepth, ByPair, ByParent, Frontier, Rows
from vllm_adaptive_tree.proposers import Proposal, Proposer, Request, StaticTree, draft_tree
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.c2t import C2T, C2TOptions
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.testing.models import ToyLM
from vllm_adaptive_tree.trees import Shape, TreeBatch
from vllm_adaptive_tree.trees.masks import ancestor_mask

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.item,  # in inference mode
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
CPU = (None, "cpu", torch.device("cpu"))


class HostSyncError(Exception):
    pass


class NoWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        masks = packet in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        target = kwargs.get("device") if packet is aten._to_copy else None
        to_host = target == torch.device("cpu")
        to_device = target is not None and args[0].device != target and not kwargs.get("non_blocking")
        if packet in WAITS or masks or to_host or to_device:
            raise HostSyncError(str(func))
        devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0}
        assert len(devices) <= 1, f"{func} mixes {devices}"
        return func(*args, **kwargs)


class NoLists(TorchFunctionMode):
    """A list among the indices, or as the data of a tensor made on a device, goes there by a copy that waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = any(isinstance(index, list | range) for index in indices)
        else:
            lists = func in (torch.tensor, torch.as_tensor) and kwargs.get("device", "cpu") not in CPU
            lists |= func is Tensor.new_tensor
        if lists:
            raise HostSyncError(str(func))
        return func(*args, **kwargs)


class NoHostSync(ExitStack):
    def __enter__(self) -> Self:
        self.enter_context(NoWaits())
        self.enter_context(NoLists())
        return self


# On the CPU the code runs on values; a meta tensor stands for a device's, where copies to the host can be seen.
DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@DEVICES
@pytest.mark.parametrize(
    "name", ["item", "bool", "int", "nonzero", "mask", "assign", "unique", "equal", "list", "put", "repeat"]
)
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
        "list": lambda: x[[1, 2]],
        "put": lambda: x.__setitem__([1, 2], x[0]),
        "repeat": lambda: x.repeat_interleave(x.long()),
    }
    with NoHostSync(), pytest.raises(HostSyncError):
        offenders[name]()


@pytest.mark.parametrize("copy", [Tensor.cpu, Tensor.tolist])
def test_the_mode_sees_copies_to_the_host(copy):
    with NoHostSync(), pytest.raises(HostSyncError):
        copy(torch.ones(2, device="meta"))


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.ones(2, device="meta").new_tensor([1]),
        lambda: torch.ones(2).to("meta"),
    ],
)
def test_the_mode_sees_copies_to_the_device_that_wait(copy):
    with NoHostSync(), pytest.raises(HostSyncError):
        copy()


def test_the_mode_lets_pass_what_does_not_wait():
    with NoHostSync():
        x = torch.tensor([1, 2]).to("meta", non_blocking=True)
        x[:, None][x, 0], x[..., 1:], torch.full_like(x, 3), torch.where(x > 1, 0.5, x)


def tree_on(device: str) -> TreeBatch:
    tree = grow_trees([ToyLM.random(3, 3, seed=seed) for seed in range(2)], nodes=5, max_depth=3)
    return TreeBatch(*(column.to(device) for column in tree))


class BlindDrafter:
    def __init__(self, logits: Tensor):
        self.logits = logits  # [R, W, V]

    def grow(self, tokens: Tensor, parent: Tensor, state: None) -> tuple[Rows, None]:
        return Rows(self.logits[:, : tokens.shape[1]]), state


REQUESTS, NODES, VOCABULARY = 2, 6, 9
SHAPE = Shape.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
KINDS: list[Kind] = ["one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one"]
PROPOSERS: dict[str, Callable[[str], Proposer]] = {
    "adaptive": lambda device: adaptive(device),
    "opt_tree": lambda device: OptTree(max_depth=4, threshold=0.1),
    "eagle2": lambda device: Eagle2(max_depth=4, top_k=3),
    "dyspec, heap": lambda device: DySpec(max_depth=4, max_children=3, threshold=0),
    "dyspec, threshold": lambda device: DySpec(max_depth=4, max_children=3, threshold=0.05),
    "c2t": lambda device: c2t(device, "tree"),
    "c2t, chain": lambda device: c2t(device, "chain"),
    "mcsd": lambda device: Mcsd(SHAPE, gate=Gate(11, 4).to(device)),
    **{f"static, {kind}": lambda device, kind=kind: StaticTree(SHAPE, kind=kind) for kind in KINDS},
}


def adaptive(device: str) -> AdaptiveTree:
    proposer = AdaptiveTree(max_depth=4, max_children=3, drawn_from=0.5)
    proposer.acceptance.to(torch.device(device))
    return proposer


def c2t(device: str, mode: str) -> C2T:
    gate = Gate(3, 4).to(device)
    return C2T(gate, C2TOptions(beta=0.4, top_k=3, entropy_top=5, max_depth=4, mode=mode))


def keyed(device: str, purpose: int = 0) -> CounterRNG:
    return CounterRNG(*torch.arange(2 * REQUESTS, device=device).view(2, -1), purpose)


@DEVICES
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposers(name, device):
    widths = cycle([NODES, 2, 4])

    def cut(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
        width = next(widths)
        return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), True

    proposer = PROPOSERS[name](device)
    root, below = (
        Rows(torch.randn(REQUESTS, 1, VOCABULARY).to(device)),
        torch.randn(REQUESTS, NODES, VOCABULARY).to(device),
    )
    temperature, greedy = torch.ones(REQUESTS).to(device), (torch.arange(REQUESTS) > 0).to(device)

    def run() -> Proposal:
        request = Request(temperature, greedy, keyed(device))
        return draft_tree(proposer, BlindDrafter(below), root, None, nodes=NODES, request=request, agree=cut)

    run()  # what is made once for a device may wait
    with NoHostSync():
        proposal = run()
    columns = [*proposal.tree, proposal.read, proposal.num_planned]
    assert [(column.shape[1], column.device.type) for column in columns] == [(NODES, device)] * 5 + [
        (NODES + 1, device)
    ]


@DEVICES
@pytest.mark.parametrize("kind", ["depth", "parent", "candidates", "pairs"])
def test_lattices(kind, device):
    bias = torch.randn(VOCABULARY, VOCABULARY).to(device)
    logits, scores = torch.randn(REQUESTS, 3, VOCABULARY).to(device), torch.randn(REQUESTS, 3, 4, 4).to(device)
    candidates = torch.arange(4).expand(REQUESTS, 3, 4).to(device)
    tokens, roots = torch.ones(REQUESTS, 2, dtype=torch.int64).to(device), torch.arange(REQUESTS).to(device)
    drafter, given = {
        "depth": (ByDepth(), (logits,)),
        "parent": (ByParent(bias.__getitem__), (logits, None, roots)),
        "candidates": (ByParent(bias.__getitem__, VOCABULARY), (logits[..., :4], candidates, roots)),
        "pairs": (ByPair(VOCABULARY), (scores, candidates)),
    }[kind]
    with NoHostSync():
        rows, state = drafter.begin(*given)
        found = [rows, *(drafter.grow(tokens, tokens - 1, state)[0] for _ in range(2))]
    assert [(rows.logits.shape, rows.logits.device.type) for rows in found] == [
        ((REQUESTS, width, VOCABULARY), device) for width in (1, 2, 2)
    ]


@DEVICES
def test_tree_batch(device):
    tree, two = tree_on(device), torch.tensor([1, 2]).to(device)
    with NoHostSync():
        cut = tree.cut(two)
        found = [cut.child(two, two), cut.children(two, 3), cut.nth_child(two, two)]
        found += [ancestor_mask(cut.parent), top_nodes(cut.log_weight, two, 3)]
    assert {x.device.type for x in found} == {device}


@DEVICES
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.draw])
def test_rules(rule, device):
    p, q = (torch.rand(REQUESTS, VOCABULARY).softmax(1).to(device) for _ in range(2))
    tokens, drawn = torch.tensor([[1, 2, 3], [4, -1, -1]]).to(device), torch.tensor([3, 2]).to(device)
    with NoHostSync():
        token = RULES[rule].draw(p, q, Children(tokens, drawn, 3), keyed(device))
    assert (token.shape, token.device.type) == ((REQUESTS,), device)


@DEVICES
def test_walk(device):
    tree = tree_on(device)
    law = torch.rand(6, REQUESTS, 3).to(device)  # [N + 1, R, V]
    row = torch.arange(REQUESTS).to(device)
    with NoHostSync():
        accepted = walk(tree, lambda node, active: (law[node + 1, row].argmax(1), torch.ones_like(active)), levels=3)
    assert (accepted.tokens.shape, accepted.tokens.device.type) == ((REQUESTS, 4), device)


@DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_traversal(kind, device):
    tree = tree_on(device)
    p, q = (torch.rand(6, REQUESTS, 3).softmax(2).to(device) for _ in range(2))
    row, drawn = torch.arange(REQUESTS).to(device), torch.full((REQUESTS,), 2).to(device)
    with NoHostSync():
        accepted = traversal(
            tree,
            kind,
            lambda node, active: p[node + 1, row],
            lambda node: (q[node + 1, row], drawn),
            keyed(device),
            levels=3,
            most=3,
            active=row > 0,
        )
    assert (accepted.tokens.shape, accepted.tokens.device.type) == ((REQUESTS, 4), device)


@DEVICES
def test_rng(device):
    law, place = torch.rand(REQUESTS, 4, VOCABULARY).to(device), torch.arange(4).expand(REQUESTS, 4).to(device)
    with NoHostSync():
        rng = keyed(device).fold_in(place)
        answers = rng.sample(law), rng.accept(law[..., 0]), rng.sample_without_replacement(law, 3)
    assert [answer.shape for answer in answers] == [(REQUESTS, 4), (REQUESTS, 4), (REQUESTS, 4, 3)]


def test_the_pure_rooms_do_not_import_vllm():
    rooms = ", ".join(
        f"vllm_adaptive_tree.{room}" for room in ("trees", "proposers", "acceptance", "gates", "rng", "config")
    )
    check = f"import sys, {rooms}; sys.exit(', '.join(m for m in sys.modules if m.split('.')[0] == 'vllm') or None)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
