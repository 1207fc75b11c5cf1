"""Draws and rules as Triton's kernels: the tokens of PyTorch's operations, key by key.

Without a GPU in Triton's interpreter, in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES, Children, traversal, walk
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.proposers import Request, StaticTree, draft_tree
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import Shape, TreeBatch

from .test_no_host_sync import NoHostSync
from .test_orders import recursive_tree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")


def kernels() -> Any:
    from vllm_adaptive_tree import kernels

    return kernels


def rngs(count: int) -> tuple[CounterRNG, CounterRNG]:
    """One of each, with the same keys."""
    seed = torch.arange(count, device=DEVICE) - count // 2
    position = torch.arange(count, device=DEVICE) * 3
    return CounterRNG(seed, position, 1), kernels().FusedRNG(seed, position, 1)


def laws(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Peaked ones, with zeros."""
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    low = logits < logits.amax(-1, keepdim=True).clamp(max=-1)
    return logits.masked_fill(low, -torch.inf).softmax(-1).to(DEVICE, dtype)


class Pool:
    """A drafter without a model."""

    def __init__(self, logits: Tensor):
        self.logits, self.read = logits, 1

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        first, self.read = self.read, self.read + tokens.shape[1]
        return Rows(self.logits[:, first : self.read]), state


@TRITON
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [
        __file__.replace("test_kernels", name) for name in ("test_kernels", "test_step_kernels", "test_growth_kernels")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *files,
        "-k",
        "TestKernels or TestStepKernels or TestGrowthKernels",
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


class TestKernels:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize("vocabulary", [1, 5, 64, 65, 1000])
    def test_sample(self, vocabulary):
        expected, found = rngs(20)
        law = laws(20, vocabulary)
        for _ in range(3):
            assert found.sample(law).tolist() == expected.sample(law).tolist()
        keys = torch.arange(3, device=DEVICE).expand(20, -1)
        wide = laws(20, 3, vocabulary)
        assert found.fold_in(keys).sample(wide).tolist() == expected.fold_in(keys).sample(wide).tolist()

    @pytest.mark.parametrize(("vocabulary", "k"), [(5, 5), (130, 1), (200, 7), (30, 25)])
    def test_without_replacement(self, vocabulary, k):
        expected, found = rngs(6)
        law = laws(6, 2, vocabulary)
        keys = torch.arange(2, device=DEVICE).expand(6, -1)
        drawn = found.fold_in(keys).sample_without_replacement(law, k)
        assert drawn.tolist() == expected.fold_in(keys).sample_without_replacement(law, k).tolist()
        assert (drawn[..., -1] < 0).any() == (k in (5, 25)), "some laws are used up"
        assert law.gather(-1, drawn.clamp(min=0))[drawn >= 0].min() > 0

    def test_numbers_go_on_behind_several_draws(self):
        expected, found = rngs(10)
        law = laws(10, 100)
        for rng in (expected, found):
            rng.sample_without_replacement(law, 3)
        assert found.sample(law).tolist() == expected.sample(law).tolist()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize(
        ("rule", "k"),
        [
            *(("rrs", 1), ("rrs", 5), ("rrsw", 1), ("rrsw", 6), ("spechub", 1), ("spechub", 2)),
            *(("greedy_multi_draft", 1), ("greedy_multi_draft", 4), ("k_seq", 1), ("k_seq", 5)),
        ],
    )
    def test_rules(self, rule, k, dtype):
        """Children of every kind of request: some without, laws that are equal, that share nothing, greedy ones."""
        requests, vocabulary = 80, 150
        expected, found = rngs(requests)
        p, q = laws(requests, vocabulary, dtype=dtype, seed=1), laws(requests, vocabulary, dtype=dtype, seed=2)
        p[:6] = q[:6]
        q[6:10] = 0
        p[10:14] = torch.nn.functional.one_hot(p[10:14].argmax(-1), vocabulary)
        p[14:18, :75], q[14:18, 75:] = 0, 0
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True).clamp(min=1e-30)
        draws, _ = rngs(requests)
        planned = torch.full_like(draws.seed, k)
        own = draws.fold_in(torch.zeros_like(planned)[:, None])
        tokens = draw_children(RULES[rule].kinds[0], q[:, None], planned[:, None], k, own, None)[:, 0]
        tokens = tokens[:, :k].clamp(max=vocabulary - 1)
        tokens[18:20] = -1
        tokens[20:24, k // 2 :] = -1
        tokens[24:28] = q[24:28].topk(k).indices  # chosen, not drawn
        if rule != "k_seq":  # which draws from a residual of rounding errors then
            tokens[:3] = q[:3].topk(k, largest=False).indices  # impossible, where p is q
        planned[28:32] = torch.arange(4, device=DEVICE)  # the tree was cut, or none was wanted
        children = Children(tokens, planned, k)
        wanted = RULES[rule].draw(p, q, children, expected.fold_in(tokens[:, 0]))
        got = kernels().FUSED_RULES[RULES[rule].draw](p.clone(), q.clone(), children, found.fold_in(tokens[:, 0]))
        same = wanted == got
        assert same.all() if dtype == torch.float64 else same.float().mean() > 0.98, "rounding at a border at most"
        taken = (wanted[:, None] == tokens).int()
        most_rejected = (taken.sum(1).clamp(max=1) * taken.argmax(1)).max()
        assert most_rejected >= min(k - 1, 2) - (rule == "greedy_multi_draft"), "some reject two"
        assert (taken.sum(1) == 0).sum() > 10

    @pytest.mark.parametrize(
        ("kind", "mixed"), [("without_replacement", False), ("without_replacement", True), ("iid", False)]
    )
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_traversal(self, kind, mixed, dtype, monkeypatch):
        """Tokens that the target never takes, one law that is the draft's, and requests to leave alone; `mixed`: some
        nodes are chosen."""
        requests, vocabulary = 9, 40
        shape = Shape.named("binary", 14) if kind == "iid" else Shape.k_config([3, 2, 1])
        generator = torch.Generator().manual_seed(0)
        draft = 2 * torch.randn(requests, len(shape) + 1, vocabulary, generator=generator, dtype=torch.float64)
        temperature = torch.linspace(0.7, 1.2, requests, dtype=torch.float64)
        noise = torch.randn(draft.shape, generator=generator, dtype=torch.float64)
        noise[0, 0] = 0
        noise[..., 35:] = -torch.inf
        draft, noise, temperature = (part.to(DEVICE, dtype) for part in (draft, noise, temperature))
        draws, _ = rngs(requests)
        request = Request(temperature, temperature < 0, draws.fold_in(torch.arange(requests, device=DEVICE)))
        proposer, nodes = StaticTree(shape, kind=kind), len(shape)
        proposal = draft_tree(proposer, Pool(draft), Rows(draft[:, :1]), None, nodes=nodes, request=request)
        tree, row = proposal.tree, torch.arange(requests, device=DEVICE)
        slot = torch.cat([torch.zeros_like(row)[:, None], proposal.read], 1).clamp(min=0)
        target = draft[row[:, None], slot] / temperature[:, None, None] + noise
        among = row < 7

        def q(node: Tensor) -> tuple[Tensor, Tensor]:
            drawn = proposal.num_planned.gather(1, node[:, None] + 1)[:, 0]
            return (draft[row, slot[row, node + 1]] / temperature[:, None]).softmax(-1), drawn

        def p(node: Tensor, active: Tensor) -> Tensor:
            return target[row, node + 1].softmax(-1)

        rows = draft.shape[1]
        chosen = (torch.rand(tree.tokens.shape, generator=generator) < 0.4).to(DEVICE) if mixed else None
        tables = kernels().TraversalInputs(
            target.flatten(0, 1), row * rows, draft.flatten(0, 1), row[:, None] * rows + slot, temperature, chosen
        )
        how = {"levels": shape.depth, "active": among}
        lengths = set()
        for seed in range(2):
            expected, found = rngs(requests)
            at = row * 5 + seed
            wanted = traversal(tree, kind, p, q, expected.fold_in(at), most=3, chosen=chosen, **how)
            got = kernels().traversal(tree, kind, tables, found.fold_in(at), **how)
            same = (wanted.tokens == got.tokens)[among].all(1) & (wanted.nodes == got.nodes)[among].all(1)
            assert same.all() if dtype == torch.float64 else same.float().mean() > 0.7, "rounding at a border at most"
            with monkeypatch.context() as patch:
                patch.setattr(sys.modules["vllm_adaptive_tree.kernels.traversal"], "SCRATCH", 1)
                parts = kernels().traversal(tree, kind, tables, rngs(requests)[1].fold_in(at), levels=shape.depth)
            assert torch.equal(parts.tokens[among], got.tokens[among]), "four requests at once"
            lengths |= set((got.nodes[among] >= 0).sum(1).tolist())
        assert lengths >= {0, shape.depth}

    @pytest.mark.parametrize("rule", ["rrs", "rrsw", "spechub", "greedy_multi_draft", "k_seq"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("vocabulary", [40, 200])
    def test_rejection_walk(self, rule, dtype, vocabulary):
        """Of whole trees. Residuals of some rules hit children, below which the walk goes on."""
        requests, levels = 24, 3
        shape = Shape.k_config([2, 2, 1] if rule == "spechub" else [3, 2, 1])
        kind = RULES[rule].kinds[0]
        generator = torch.Generator().manual_seed(0)
        draft = 2 * torch.randn(requests, len(shape) + 1, vocabulary, generator=generator, dtype=torch.float64)
        temperature = torch.linspace(0.7, 1.2, requests, dtype=torch.float64)
        noise = torch.randn(draft.shape, generator=generator, dtype=torch.float64)
        noise = noise * (20 / vocabulary + 0.5)
        noise[0, 0] = 0
        noise[..., 35:40] = -torch.inf
        draft, noise, temperature = (part.to(DEVICE, dtype) for part in (draft, noise, temperature))
        draws, _ = rngs(requests)
        request = Request(temperature, temperature < 0, draws.fold_in(torch.arange(requests, device=DEVICE)))
        proposer = StaticTree(shape, kind=kind)
        proposal = draft_tree(proposer, Pool(draft), Rows(draft[:, :1]), None, nodes=len(shape), request=request)
        tree, row = proposal.tree, torch.arange(requests, device=DEVICE)
        slot = torch.cat([torch.zeros_like(row)[:, None], proposal.read], 1)
        target = draft[row[:, None], slot.clamp(min=0)] / temperature[:, None, None] + noise
        rows = target.shape[1]
        tables = kernels().RejectionInputs(
            target.flatten(0, 1), row * rows, draft, row, slot, proposal.num_planned, temperature
        )
        among = row < 20
        draw, lengths = RULES[rule].draw, set()
        for seed in range(2):
            expected, found = rngs(requests)
            at = row * 5 + seed
            expected, found = expected.fold_in(at), found.fold_in(at)

            def by_rule(node: Tensor, active: Tensor, rng=expected) -> tuple[Tensor, Tensor]:
                p = target[row, node + 1].softmax(-1)
                q = (draft[row, slot[row, node + 1].clamp(min=0)] / temperature[:, None]).softmax(-1)
                children = Children(tree.children(node, 3), proposal.num_planned.gather(1, node[:, None] + 1)[:, 0], 3)
                return draw(p, q, children, rng.fold_in(node + 1)), torch.ones_like(active)

            wanted = walk(tree, by_rule, levels=levels)
            got = kernels().rejection_walk(tree, draw, tables, found, levels=levels, most=3, active=among)
            same = (wanted.tokens == got.tokens)[among].all(1) & (wanted.nodes == got.nodes)[among].all(1)
            assert same.all() if dtype == torch.float64 else same.float().mean() > 0.7, "rounding at a border at most"
            lengths |= set((got.nodes[among] >= 0).sum(1).tolist())
        assert lengths >= {0, levels}

    @pytest.mark.parametrize("nodes", [1, 9, 30])
    def test_walk(self, nodes):
        """Few tokens, so that paths are long; siblings may carry the same."""
        generator = torch.Generator().manual_seed(nodes)
        trees = [recursive_tree(nodes, seed) for seed in range(20)]
        parent = torch.tensor([tree.parents for tree in trees])
        tokens = torch.randint(2, parent.shape, generator=generator)
        tokens[:, nodes - nodes // 3 :] = -1
        zeros = torch.zeros_like(parent)
        tree = TreeBatch(*(part.to(DEVICE) for part in (tokens, parent, zeros, zeros.float())))
        draws = torch.randint(2, (20, 1 + nodes), generator=generator).to(DEVICE)
        row = torch.arange(20, device=DEVICE)

        def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            return draws[row, node + 1], torch.ones_like(active)

        wanted = walk(tree, draw, levels=4)
        got = kernels().walk(tree, draws.flatten(), row * (1 + nodes), levels=4)
        assert [part.tolist() for part in wanted] == [part.tolist() for part in got]
        assert nodes == 1 or (wanted.nodes >= 0).sum(1).max() >= 2

    def test_nothing_to_draw(self):
        _, found = rngs(0)
        law = laws(1, 70)[:0]
        assert found.sample(law).shape == (0,)
        nobody = Children(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), torch.empty(0), 2)
        assert kernels().FUSED_RULES[RULES["rrs"].draw](law, law, nobody, found).shape == (0,)

    def test_the_host_reads_shapes_only(self, monkeypatch):
        class Launch:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: None

        names = (
            "sampling._begin",
            "sampling._fold_in",
            "sampling._sample",
            "rules._test",
            "rejection_walk._reject",
        )
        for name in (*names, "traversal._traverse", "walk._walk"):
            module, kernel = name.split(".")
            kernels()  # whose `traversal` and `walk` are the functions of these modules
            monkeypatch.setattr(sys.modules[f"vllm_adaptive_tree.kernels.{module}"], kernel, Launch())
        seed = torch.arange(3).to("meta")
        law = torch.empty(3, 100, device="meta")
        tokens = torch.empty(3, 2, dtype=torch.int64, device="meta")
        with NoHostSync():
            rng = kernels().FusedRNG(seed, seed, 1).fold_in(seed)
            rng.sample_without_replacement(law, 4)
            kernels().FUSED_RULES[RULES["rrsw"].draw](law, law, Children(tokens, seed, 2), rng)
            tree = TreeBatch(tokens, tokens, tokens, torch.empty(3, 2, device="meta"))
            read = torch.empty(3, 3, dtype=torch.int64, device="meta")
            tables = kernels().TraversalInputs(law, seed, law, read, torch.empty(3, device="meta"))
            kernels().traversal(tree, "iid", tables, rng, levels=2)
            one = torch.empty(3, device="meta")
            inputs = kernels().RejectionInputs(law, seed, law[:, None], seed, read, read, one)
            kernels().rejection_walk(tree, RULES["rrsw"].draw, inputs, rng, levels=2, most=2)
            kernels().walk(tree, seed, seed, levels=2)
