"""Cost of a step's tree on a device besides the two models: choosing and drawing nodes, and accepting them.

    python -m benchmarks.gpu.tree_operations --out benchmarks/results/gpu/tree_operations.json

Per method and rule, a batch of trees over laws drawn at random (as peaked as a small draft's), no model: every draft
level and every walk runs to its largest depth, as it does where the host reads no value of the device. With the kernels
of `vllm_adaptive_tree/kernels` ("fused"), as in the engine, and by PyTorch alone; in a CUDA graph, and without one
("eager", the launches of the host included). `operations` are what they start, views apart, counted without a device.
The floor: the draft's rows that a tree reads and the target's rows that are drawn from or that a path can visit, in
float32, over the bandwidth of a copy, plus 0.1 ms. `--device cpu` counts, and times PyTorch alone.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface  # type: ignore[import-untyped]

from benchmarks.gpu.timing import copy_bandwidth, microseconds, wall_microseconds
from benchmarks.tree_work import CASES
from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import Accepted, Children, TargetOnly, traversal, walk
from vllm_adaptive_tree.acceptance.rule import Draw
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.kernels import REJECTION_RULES, TRAVERSAL_KINDS, FusedRNG, RejectionInputs, TraversalInputs
from vllm_adaptive_tree.methods import Pair, resolve
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG

T = TypeVar("T")
BATCHES = (1, 16)
NODES, VOCABULARY = 64, 128_256
MOST_LEVELS = 8
"""Of a tree; a heap (one node a level) would take `NODES` forwards of the draft."""
IDLE = ("empty", "empty_like", "promote_types", "_unsafe_view")
"""Operations that run nothing."""
SMALL = 100.0
"""Microseconds besides the floor."""


class Case(NamedTuple):
    pair: Pair
    pool: Tensor  # [R, W, V] logits
    request: Request
    rng: CounterRNG  # of the walk
    nodes: int
    rule: Draw | None
    processed: Tensor  # [R, W, V] the target's logits over its temperature

    @classmethod
    def of(cls, method: str, rule: str, tree: dict[str, Any], pool: Tensor, nodes: int, fused: bool) -> "Case":
        data = {"method": method, "model": "none", "num_speculative_tokens": nodes, "rejection_sample_method": rule}
        options, _ = TreeOptions.parse({**data, "tree": tree})
        requests, device = pool.shape[0], pool.device
        seed = torch.arange(requests, device=device)
        rng = [(FusedRNG if fused else CounterRNG)(seed, torch.full_like(seed, 17), purpose) for purpose in (0, 1)]
        temperature = torch.full((requests,), 0.8, device=device)
        pair = resolve(options)
        if fused:
            pair = pair._replace(proposer=pair.proposer.for_gpu())
        if pair.proposer.acceptance is not None:
            pair.proposer.acceptance.to(device)
        request = Request(temperature, temperature < 0, rng[0])
        return cls(pair, pool, request, rng[1], nodes, pair.rule.draw, pool / 0.8)

    @property
    def levels(self) -> int:
        return min(self.pair.proposer.max_depth, self.nodes, MOST_LEVELS)

    @property
    def by_target(self) -> bool:
        return self.pair.rule is TargetOnly

    def draft(self) -> tuple[Proposal, int]:
        """The trees, and how many rows of a request were read."""
        drafter = _Pool(self.pool)
        proposal = draft_tree(
            self.pair.proposer,
            drafter,
            Rows(self.pool[:, :1]),
            None,
            nodes=self.nodes,
            request=self.request,
            agree=lambda frontier, growing: (frontier, drafter.levels < self.levels),
        )
        return proposal, drafter.rows

    def accept(self, proposal: Proposal) -> Accepted:
        tree, pair, most = proposal.tree, self.pair, min(self.pair.proposer.max_children, self.nodes)
        row = torch.arange(len(self.pool), device=self.pool.device)
        temperature = self.request.temperature
        slot = torch.nn.functional.pad(proposal.read, (1, 0)).clamp(0, self.pool.shape[1] - 1)

        def p(node: Tensor, active: Tensor) -> Tensor:
            return self.processed[row, 1 + node].softmax(-1)

        def q(node: Tensor) -> tuple[Tensor, Tensor]:
            at = node[:, None] + 1
            q = softmax_at(self.pool[row, slot.gather(1, at)[:, 0]], temperature)
            return q, proposal.num_planned.gather(1, at)[:, 0]

        rule, kind, rows = self.rule, pair.proposer.kind, self.pool.shape[1]
        if rule is None and isinstance(self.rng, FusedRNG) and kind in TRAVERSAL_KINDS:
            draft, target = self.pool.flatten(0, 1), self.processed.flatten(0, 1)
            tables = TraversalInputs(target, row * rows, draft, row[:, None] * rows + slot, temperature)
            return kernels.traversal(tree, kind, tables, self.rng, levels=self.levels)
        if rule is None:
            return traversal(tree, kind, p, q, self.rng, levels=self.levels, most=most)
        if isinstance(self.rng, FusedRNG) and rule in REJECTION_RULES:
            sources = self.processed.flatten(0, 1), row * rows, self.pool, row, slot, proposal.num_planned, temperature
            inputs = RejectionInputs(*sources)
            return kernels.rejection_walk(tree, rule, inputs, self.rng, levels=self.levels, most=most)
        if self.by_target:  # a draw behind every node, as vLLM's sampler makes them
            nodes = torch.arange(self.pool.shape[1], device=self.pool.device).expand(len(self.pool), -1)
            tokens = self.rng.fold_in(nodes).sample(self.processed.softmax(-1))
            if isinstance(self.rng, FusedRNG):
                return kernels.walk(tree, tokens.flatten(), row * rows, levels=self.levels)
            return walk(tree, lambda node, active: (tokens[row, 1 + node], torch.ones_like(active)), levels=self.levels)

        def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            draft, drawn = q(node)
            children = Children(tree.children(node, most), drawn, most)
            return rule(p(node, active), draft, children, self.rng.fold_in(node + 1)), torch.ones_like(active)

        return walk(tree, draw, levels=self.levels)


class _Pool:
    """A drafter without a model."""

    def __init__(self, pool: Tensor):
        self.pool, self.rows, self.levels = pool, 1, 1

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        width = tokens.shape[1]
        self.rows, self.levels = self.rows + width, self.levels + 1
        return Rows(self.pool[:, :width]), state


class _Operations(TorchDispatchMode):
    """Takes the place of a kernel, too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func._opname in IDLE)
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        self.count += 1
        return lambda *args, **kwargs: None


def operations(call: Callable[[], T]) -> tuple[int, T]:
    """Number of operations of `call`, and its result: shapes without values."""
    seen = _Operations()
    with mock.patch.object(KernelInterface, "__getitem__", lambda _, grid: seen[grid]), seen:
        found = call()
    return seen.count, found


def measured(
    method: str, rule: str, tree: dict[str, Any], pool: Tensor, nodes: int, bandwidth: float, fused: bool
) -> dict[str, Any]:
    """Microseconds."""
    case = Case.of(method, rule, tree, pool, nodes, fused)
    shapes = Case.of(method, rule, tree, pool.to("meta"), nodes, fused)
    drafting, (drawn, rows) = operations(shapes.draft)
    accepting, _ = operations(lambda: shapes.accept(drawn))
    visits = pool.shape[1] if case.by_target else 1 + case.levels

    def both() -> object:
        return case.accept(case.draft()[0])

    found: dict[str, Any] = {"method": method, "rule": rule, "tree": tree, "requests": len(pool), "fused": fused}
    found |= {"draft_rows": rows, "target_rows": visits}
    found["floor"] = len(pool) * (rows + visits) * pool.shape[2] * pool.element_size() / bandwidth + SMALL
    found["operations"] = {"draft": drafting, "accept": accepting}
    if pool.device.type == "cuda" or not fused:
        found["eager"] = wall_microseconds(both)
    if pool.device.type == "cuda":
        proposal, _ = case.draft()
        parts: dict[str, Callable[[], object]] = {
            "graph": both,
            "draft": case.draft,
            "accept": lambda: case.accept(proposal),
        }
        for name, call in parts.items():
            found[name] = microseconds([call])
        found["ratio"] = found["graph"] / found["floor"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu/tree_operations.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--nodes", type=int, default=NODES)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu.tree_operations needs a CUDA device, and PyTorch sees none here.", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth(options.device, 1 << (30 if options.device == "cuda" else 26))
    generator = torch.Generator(options.device).manual_seed(0)
    rows = []
    for requests in BATCHES:
        shape = (requests, 1 + options.nodes, options.vocabulary)
        pool = 4 * torch.randn(shape, generator=generator, device=options.device)
        for method, rule, tree in CASES:
            for fused in (True, False):
                row = measured(method, rule, tree, pool, options.nodes, bandwidth, fused)
                rows.append(row)
                print(json.dumps(row), flush=True)
    results = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "bandwidth_gb_s": bandwidth / 1e3,
        "unit": "microseconds",
        "shape": {"nodes": options.nodes, "vocabulary": options.vocabulary, "levels": MOST_LEVELS},
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
