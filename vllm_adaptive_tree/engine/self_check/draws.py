"""Check B: kernels of draws and rules against PyTorch's operations on the same keys.

It runs in float64, where both take the same tokens, and includes ties, distributions without a token left, and children
of probability 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vllm_adaptive_tree import kernels
from vllm_adaptive_tree.acceptance import RULES, Accepted, Children, Kind, traversal, walk
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.self_check.trees import random_parents
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.proposers import Request, StaticTree, draft_tree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import Shape, TreeBatch

ROWS = 8
CHILDREN = 5
NODES = 9
LEVELS = 4
REJECTION_RULES = tuple(kernels.REJECTION_RULES.values())


def check(*, vocabulary: int, device: torch.device) -> Finding:
    """Run the check. Figures: by kernel, the number of tokens that differ from PyTorch's."""
    distributions = _RandomDistributions(vocabulary, device)
    kinds: tuple[Kind, Kind] = ("without_replacement", "iid")
    differing = {
        "draws": _draws(distributions),
        "walk": _walk(device),
        **{rule: _rule(distributions, rule) for rule in REJECTION_RULES},
        **{f"walk by {rule}": _rejection(distributions, rule) for rule in REJECTION_RULES},
        **{f"traversal, {kind}": _traversal(distributions, kind) for kind in kinds},
        "traversal, some chosen": _traversal(distributions, "without_replacement", mixed=True),
    }
    return Finding("draws", not any(differing.values()), differing)


def drawn(*, vocabulary: int, device: torch.device) -> list[int]:
    """Tokens that the kernel draws; the same on every rank."""
    tokens: list[int] = _rngs(device)[1].sample(_RandomDistributions(vocabulary, device).peaked()).tolist()
    return tokens


class _RandomDistributions:
    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device
        self.random = torch.Generator().manual_seed(0)

    def logits(self, *shape: int) -> Tensor:
        logits = 3 * torch.randn(*shape, self.vocabulary, generator=self.random, dtype=torch.float64)
        return logits.to(self.device)

    def peaked(self) -> Tensor:
        """Distributions [ROWS, V] without improbable tokens; the first is uniform, the second has a single token."""
        logits = self.logits(ROWS)
        probs = logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 8, -torch.inf).softmax(-1)
        probs[0] = 1 / self.vocabulary
        probs[1] = one_hot(probs[1].argmax(), self.vocabulary)
        return probs


def _rngs(device: torch.device) -> tuple[CounterRNG, kernels.FusedRNG]:
    """Generators of PyTorch and of the kernels, with the same keys."""
    seed = torch.arange(ROWS, device=device) - ROWS // 2
    return CounterRNG(seed, 3 * seed + 50, 1), kernels.FusedRNG(seed, 3 * seed + 50, 1)


def _different(expected: Tensor, computed: Tensor) -> int:
    return int((expected != computed).sum())


def _draws(distributions: _RandomDistributions) -> int:
    expected, fused = _rngs(distributions.device)
    probs = distributions.peaked()
    wrong = _different(expected.sample(probs), fused.sample(probs))
    drawn = (rng.sample_without_replacement(probs, CHILDREN) for rng in (expected, fused))
    return wrong + _different(*drawn)


def _walk(device: torch.device) -> int:
    """Compare walks over few distinct tokens, so that paths are long."""
    random = torch.Generator().manual_seed(0)
    parent = torch.tensor([random_parents(NODES, seed=row, levels=LEVELS) for row in range(ROWS)])
    tokens = torch.randint(2, parent.shape, generator=random)
    tokens[:, -2:] = -1
    draws = torch.randint(2, (ROWS, 1 + NODES), generator=random).to(device)
    tree = TreeBatch(*(part.to(device) for part in (tokens, parent, parent, parent.float())))
    row = torch.arange(ROWS, device=device)
    expected = walk(tree, lambda node, active: (draws[row, node + 1], torch.ones_like(active)), levels=LEVELS)
    fused = kernels.walk(tree, draws.flatten(), row * (1 + NODES), levels=LEVELS)
    return sum(map(_different, expected, fused))


def _rule(distributions: _RandomDistributions, rule: str) -> int:
    draw = RULES[rule].draw
    assert draw is not None
    p, q = distributions.peaked(), distributions.peaked()
    p[2] = q[2]
    q[3] = 0
    tokens = _rngs(distributions.device)[0].sample_without_replacement(q, CHILDREN)
    tokens[4, 2:] = -1
    tokens[5] = p[5].topk(CHILDREN).indices  # chosen, not drawn
    children = Children(tokens, torch.full_like(tokens[:, 0], CHILDREN), CHILDREN)
    expected, fused = _rngs(distributions.device)
    fused_rule: Any = kernels.FUSED_RULES[draw]
    return _different(draw(p, q, children, expected), fused_rule(p.clone(), q.clone(), children, fused))


class _Table:
    """Draft without a model: a table of logits."""

    def __init__(self, logits: Tensor):
        self.logits, self.read = logits, 1  # [ROWS, slots, V]

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        first, self.read = self.read, self.read + tokens.shape[1]
        return Rows(self.logits[:, first : self.read]), state


class _Drafted:
    """Trees of a fixed shape, and target distributions near the draft's, so that paths are long."""

    def __init__(self, distributions: _RandomDistributions, kind: Kind):
        widest = 2 if kind == "hub_pair" else 3
        self.kind, self.shape, device = kind, Shape.k_config([widest, 2, 1]), distributions.device
        self.draft = distributions.logits(ROWS, 1 + len(self.shape))
        self.temperature = torch.linspace(0.7, 1.2, ROWS, dtype=torch.float64, device=device)
        self.row = torch.arange(ROWS, device=device)
        request = Request(self.temperature, self.temperature < 0, _rngs(device)[0].fold_in(self.row))
        table, first, nodes = _Table(self.draft), Rows(self.draft[:, :1]), len(self.shape)
        proposer = StaticTree(self.shape, kind=kind)
        self.proposal = draft_tree(proposer, table, first, None, nodes=nodes, request=request)
        self.tree, self.most = self.proposal.tree, proposer.max_children
        self.slot = torch.cat([torch.zeros_like(self.row)[:, None], self.proposal.read], 1).clamp(min=0)
        near = self.draft[self.row[:, None], self.slot] / self.temperature[:, None, None]
        self.target = near + distributions.logits(ROWS, 1 + nodes) / 6
        self.root = self.row * (1 + nodes)
        self.active = self.row < ROWS - 1

    def q(self, node: Tensor) -> tuple[Tensor, Tensor]:
        probs = (self.draft[self.row, self.slot[self.row, node + 1]] / self.temperature[:, None]).softmax(-1)
        return probs, self.proposal.num_planned.gather(1, node[:, None] + 1)[:, 0]

    def p(self, node: Tensor, active: Tensor) -> Tensor:
        return self.target[self.row, node + 1].softmax(-1)

    def different(self, expected: Accepted, computed: Accepted) -> int:
        return sum(
            _different(ours[self.active], fused[self.active]) for ours, fused in zip(expected, computed, strict=True)
        )


def _traversal(distributions: _RandomDistributions, kind: Kind, *, mixed: bool = False) -> int:
    drafted, (ours, theirs) = _Drafted(distributions, kind), _rngs(distributions.device)
    how: dict[str, Any] = {"levels": drafted.shape.depth, "active": drafted.active}
    rows = drafted.root[:, None] + drafted.slot
    tokens = drafted.tree.tokens
    chosen = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens) % 3 == 1 if mixed else None
    tables = drafted.target.flatten(0, 1), drafted.root, drafted.draft.flatten(0, 1), rows, drafted.temperature, chosen
    expected = traversal(drafted.tree, kind, drafted.p, drafted.q, ours, most=drafted.most, chosen=chosen, **how)
    fused = kernels.traversal(drafted.tree, kind, kernels.TraversalInputs(*tables), theirs, **how)
    return drafted.different(expected, fused)


def _rejection(distributions: _RandomDistributions, rule: str) -> int:
    draw = RULES[rule].draw
    assert draw is not None
    drafted, (ours, theirs) = _Drafted(distributions, RULES[rule].kinds[0]), _rngs(distributions.device)

    def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        q, planned = drafted.q(node)
        children = Children(drafted.tree.children(node, drafted.most), planned, drafted.most)
        return draw(drafted.p(node, active), q, children, ours.fold_in(node + 1)), torch.ones_like(active)

    rows = drafted.target.flatten(0, 1), drafted.root, drafted.draft, drafted.row, drafted.slot
    inputs = kernels.RejectionInputs(*rows, drafted.proposal.num_planned, drafted.temperature)
    expected = walk(drafted.tree, by_rule, levels=drafted.shape.depth)
    how: dict[str, Any] = {"levels": drafted.shape.depth, "most": drafted.most, "active": drafted.active}
    return drafted.different(expected, kernels.rejection_walk(drafted.tree, draw, inputs, theirs, **how))
