"""Growth by kernels: the trees of the proposers in PyTorch. Without a GPU in Triton's interpreter; `test_kernels.py`
starts it."""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import KINDS
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers import Proposal, Proposer, Request, draft_tree
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.best_first import Growth, Level
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.proposers.sequoia import Sequoia
from vllm_adaptive_tree.proposers.static_tree import StaticTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import Shape, TreeBatch

from .test_kernels import DEVICE, INTERPRETED, TRITON, Pool, kernels
from .test_no_host_sync import NoHostSync

REQUESTS = 5
SHAPE = Shape.of([(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)])


class _Gate(torch.nn.Module):
    """Goes on where a token has more than half of the mass."""

    def forward(self, features: Tensor) -> Tensor:
        return features[..., 1]


METHODS: dict[str, Proposer] = {
    "adaptive_tree": AdaptiveTree(max_depth=4, max_children=4, drawn_from=0.4),
    "opt_tree": OptTree(max_depth=4, threshold=0.0),
    "eagle2": Eagle2(max_depth=4, top_k=3),
    "dyspec, heap": DySpec(max_depth=4, max_children=4, threshold=0.0),
    "dyspec, threshold": DySpec(max_depth=4, max_children=4, threshold=0.03),
    **{f"static_tree, {kind}": StaticTree(SHAPE, kind=kind) for kind in KINDS if kind != "hub_pair"},
    "static_tree, hub_pair": StaticTree(Shape.named("binary", 12), kind="hub_pair"),
    "sequoia": Sequoia(SHAPE),
    "mcsd": Mcsd(SHAPE, gate=_Gate(), stop_threshold=0.5),
}
LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda logits: logits,
    "filtered": lambda logits: logits.masked_fill(logits < logits.topk(2).values[..., -1:], -torch.inf),
    "nearly certain": lambda logits: logits * 6,
    "certain": lambda logits: logits.scatter(2, logits.argmax(2, keepdim=True), 1e4),
    "equal": torch.zeros_like,
}


def request(kind: type[CounterRNG] = CounterRNG) -> Request:
    """Greedy, sampled with chosen children, and drawn at three temperatures."""
    temperature = torch.tensor([0.6, 0.3, 0.45, 0.7, 1.0], device=DEVICE)
    greedy, chosen = (torch.tensor(which, device=DEVICE) for which in ([1, 0, 0, 0, 0], [1, 1, 0, 0, 0]))
    seed = torch.arange(REQUESTS, device=DEVICE)
    return Request(temperature, greedy.bool(), kind(seed, 3 * seed, 0), chosen=chosen.bool())


def grown(
    proposer: Proposer, pool: Tensor, *, nodes: int, width: int, waits: bool = True, fused_draws: bool = True
) -> Proposal:
    def agree(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
        return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), True

    fused_draws &= "fused" not in vars(type(proposer))
    asked = request(kernels().FusedRNG if fused_draws else CounterRNG)
    rows = pool[:, :1].clone()
    if waits:
        return draft_tree(proposer, Pool(pool.clone()), Rows(rows), None, nodes=nodes, request=asked, agree=agree)
    with NoHostSync():
        return draft_tree(proposer, Pool(pool.clone()), Rows(rows), None, nodes=nodes, request=asked, agree=agree)


def pool(nodes: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    shape = (REQUESTS, 1 + 6 * nodes, vocabulary)
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def prepared(name: str) -> tuple[Proposer, Proposer]:
    generic = copy.deepcopy(METHODS[name])
    if generic.acceptance is not None:
        random = torch.rand(generic.acceptance.chance.shape, generator=torch.Generator().manual_seed(1))
        generic.acceptance.chance.copy_(random.sort(-1).values.clamp(0.02, 0.98))
        generic.acceptance.to(torch.device(DEVICE))
    fused = generic.for_gpu()
    assert fused is not generic
    return generic, fused


def same(found: Proposal, expected: Proposal, *, exactly: bool = False) -> None:
    for part in ("tokens", "parent", "depth"):
        assert torch.equal(getattr(found.tree, part), getattr(expected.tree, part)), part
    assert torch.allclose(found.tree.log_weight, expected.tree.log_weight, rtol=0, atol=0 if exactly else 1e-4)
    assert torch.equal(found.read, expected.read)
    assert torch.equal(found.num_planned, expected.num_planned)
    if expected.cell is not None:
        valid = expected.tree.tokens >= 0
        assert torch.equal(found.cell[valid], expected.cell[valid])  # type: ignore[index]


@pytest.fixture
def same_logarithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """True in the interpreter, which has PyTorch's logarithms then: NumPy's round otherwise."""
    if INTERPRETED:
        builder: Any = import_module("triton.runtime.interpreter").InterpreterBuilder
        logarithm = lambda array: torch.from_numpy(np.array(array)).log().numpy()  # noqa: E731
        monkeypatch.setattr(builder, "create_log", lambda self, value: self.unary_op(value, logarithm))
    return INTERPRETED


class TestGrowthKernels:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize(("nodes", "width", "vocabulary"), [(12, 12, 70), (20, 3, 70), (5, 5, 3)])
    @pytest.mark.parametrize("name", METHODS)
    def test_trees(self, name, nodes, width, vocabulary):
        """Wide and narrow levels, more slots than nodes, fewer tokens than children."""
        generic, fused = prepared(name)
        rows = pool(nodes, vocabulary)
        same(grown(fused, rows, nodes=nodes, width=width), grown(generic, rows, nodes=nodes, width=width))

    @pytest.mark.parametrize("name", METHODS)
    def test_dead_rows(self, name):
        generic, fused = prepared(name)
        rows = pool(12, 70)
        rows[0, 0], rows[1, 1], rows[2, 2:5] = float("nan"), float("inf"), float("nan")
        found = grown(fused, rows, nodes=12, width=12)
        same(found, grown(generic, rows, nodes=12, width=12))
        assert not found.tree.valid[0].any()
        assert found.tree.valid[1:].any(1).all()

    @pytest.mark.parametrize(
        ("threshold", "floor", "on_device"), [(0.5, float("-inf"), False), (0.0, -1.5, False), (0.5, -1.5, True)]
    )
    @pytest.mark.parametrize("name", ["adaptive_tree", "opt_tree"])
    def test_limits(self, name, threshold, floor, on_device):
        """A level must bring something, and a node be worth its children; as numbers and as a graph reads them."""
        generic, fused = prepared(name)
        rows = pool(12, 70)
        free = grown(generic, rows, nodes=12, width=12)
        generic.threshold, generic.floor = threshold, floor
        limits: Any = (threshold, floor)
        if on_device:
            limits = torch.tensor(limits, dtype=torch.float64, device=DEVICE).unbind()
        fused.threshold, fused.floor = limits
        expected = grown(generic, rows, nodes=12, width=12)
        same(grown(fused, rows, nodes=12, width=12), expected)
        assert (expected.read >= 0).sum() < (free.read >= 0).sum()

    @pytest.mark.parametrize("name", METHODS)
    def test_another_dtype_grows_in_pytorch(self, name):
        generic, fused = prepared(name)
        rows = pool(8, 70).double()
        same(grown(fused, rows, nodes=8, width=8), grown(generic, rows, nodes=8, width=8))

    @pytest.mark.parametrize("name", METHODS)
    def test_nothing_waits(self, name):
        _, fused = prepared(name)
        assert grown(fused, pool(8, 70), nodes=8, width=8, waits=False).tree.valid.any()

    @pytest.mark.parametrize("threshold", [0.0, 0.25, 1.0])
    @pytest.mark.parametrize("vocabulary", [4, 70])
    @pytest.mark.parametrize("logits", LOGITS)
    def test_dyspec_to_the_last_bit(self, logits, vocabulary, threshold, same_logarithms):
        """All of four tokens, whose rounded sums are about 1; ties; slots worth the threshold; fewer slots than nodes.
        The threshold is as a graph reads it."""
        generic = DySpec(max_depth=3, max_children=16, threshold=threshold)
        fused = generic.for_gpu()
        fused.threshold = torch.tensor(threshold, dtype=torch.float64, device=DEVICE)
        rows, nodes = LOGITS[logits](pool(15, vocabulary)), 15
        found = grown(fused, rows, nodes=nodes, width=nodes, fused_draws=False)
        same(found, grown(generic, rows, nodes=nodes, width=nodes), exactly=same_logarithms)

    def test_a_value_does_not_see_its_own_draw(self):
        """Not even by rounding; the values of later siblings do."""
        from vllm_adaptive_tree.kernels.slots import slot_values

        _, fused = prepared("adaptive_tree")
        q = pool(1, 40)[:, :1].softmax(-1)
        zero = torch.zeros(REQUESTS, 1, device=DEVICE)
        front = Level(zero.long(), zero.long(), zero, zero - 0.1)
        growth = Growth((front,), (), zero, zero[:, 0], zero.bool(), front, 0, 0, request())
        drawn, best = torch.zeros(REQUESTS, dtype=torch.bool, device=DEVICE), q.max(-1)
        order = q.argsort(dim=-1)[..., 5:30]  # without the best
        tokens = order[..., :4].contiguous()
        values = slot_values(tokens, q, best, growth, drawn, fused.acceptance).value
        for rank, other in itertools.product(range(4), range(4, 25)):
            changed = tokens.clone()
            changed[..., rank] = order[..., other]
            found = slot_values(changed, q, best, growth, drawn, fused.acceptance).value
            assert torch.equal(found[:, : rank + 1], values[:, : rank + 1])
        found = slot_values(tokens.flip(-1), q, best, growth, drawn, fused.acceptance).value
        assert not torch.equal(found, values)

    def test_no_request(self):
        _, fused = prepared("adaptive_tree")
        nothing = Request(*(part[:0] for part in request()[:2]), CounterRNG(*torch.zeros(2, 0).long().to(DEVICE), 0))
        rows = pool(4, 10)[:0]
        assert len(draft_tree(fused, Pool(rows), Rows(rows[:, :1]), None, nodes=4, request=nothing).tree.tokens) == 0


class Recorder:
    """In place of a kernel."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **_: self.arguments.append(arguments)


@TRITON
@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("name", ["_walk", "_reject", "_traverse"])
def test_addresses_do_not_depend_on_the_number_of_requests(name, requests, monkeypatch):
    """An address that is aligned for two requests, and not for one, makes Triton compile in service."""
    modules = {"_walk": "walk", "_reject": "rejection_walk", "_traverse": "traversal"}
    module = import_module(f"vllm_adaptive_tree.kernels.{modules[name]}")
    kernel, recorder, levels, vocabulary = getattr(module, name), Recorder(), 10, 7
    monkeypatch.setattr(module, name, recorder)
    for other in ("_fold_in", "_begin", "_sample"):
        monkeypatch.setattr(import_module("vllm_adaptive_tree.kernels.sampling"), other, Recorder())
    tree = TreeBatch.empty(requests, 4, torch.device(DEVICE))
    row = torch.arange(requests, device=DEVICE)
    target, draft = (torch.zeros(5 * requests, vocabulary, device=DEVICE) for _ in range(2))
    rng, heat = kernels().FusedRNG(row, row, 0), torch.ones(requests, device=DEVICE)
    if name == "_walk":
        kernels().walk(tree, torch.zeros(5 * requests, dtype=torch.int64, device=DEVICE), row, levels=levels)
    elif name == "_reject":
        slot = torch.zeros(requests, 5, dtype=torch.int64, device=DEVICE)
        inputs = kernels().RejectionInputs(target, row, draft.unflatten(0, (requests, 5)), row, slot, slot, heat)
        rule = next(iter(kernels().REJECTION_RULES))
        kernels().rejection_walk(tree, rule, inputs, rng, levels=levels, most=2, active=row < 0)
    else:
        inputs = kernels().TraversalInputs(target, row, draft, row[:, None].expand(-1, 5), heat)
        kernels().traversal(tree, "without_replacement", inputs, rng, levels=levels)
    (arguments,) = recorder.arguments
    names = inspect.signature(kernel.fn).parameters
    loose = {one.name for one in getattr(kernel, "params", []) if one.do_not_specialize_on_alignment}
    unaligned = [
        which
        for which, given in zip(names, arguments, strict=False)
        if isinstance(given, Tensor) and which not in loose and given.data_ptr() % 16
    ]
    assert not unaligned
