"""Check B: the kernels of draws and rules against PyTorch's operations on the same keys.

In float64, where both take the same tokens; ties, laws without a token left, and children that no law holds included.
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


def check(*, vocabulary: int, device: torch.device) -> Finding:
    """`differing`: by kernel, of so many tokens those that are others than PyTorch's."""
    laws = _Laws(vocabulary, device)
    kinds: tuple[Kind, Kind] = ("without_replacement", "iid")
    differing = {
        "draws": _draws(laws),
        "walk": _walk(device),
        **{rule: _rule(laws, rule) for rule in ("rrs", "rrsw")},
        **{f"walk by {rule}": _rejection(laws, rule) for rule in ("rrs", "rrsw")},
        **{f"traversal, {kind}": _traversal(laws, kind) for kind in kinds},
    }
    return Finding("draws", not any(differing.values()), differing)


def drawn(*, vocabulary: int, device: torch.device) -> list[int]:
    """Tokens that the kernel draws; the same on every rank."""
    found: list[int] = _rngs(device)[1].sample(_Laws(vocabulary, device).peaked()).tolist()
    return found


class _Laws:
    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device
        self.random = torch.Generator().manual_seed(0)

    def logits(self, *shape: int) -> Tensor:
        found = 3 * torch.randn(*shape, self.vocabulary, generator=self.random, dtype=torch.float64)
        return found.to(self.device)

    def peaked(self) -> Tensor:
        """[ROWS, V]: without the tokens of low chance; one of ties, one of a single token."""
        logits = self.logits(ROWS)
        laws = logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 8, -torch.inf).softmax(-1)
        laws[0] = 1 / self.vocabulary
        laws[1] = one_hot(laws[1].argmax(), self.vocabulary)
        return laws


def _rngs(device: torch.device) -> tuple[CounterRNG, kernels.FusedRNG]:
    """PyTorch's and the kernels', with the same keys."""
    seed = torch.arange(ROWS, device=device) - ROWS // 2
    return CounterRNG(seed, 3 * seed + 50, 1), kernels.FusedRNG(seed, 3 * seed + 50, 1)


def _different(expected: Tensor, found: Tensor) -> int:
    return int((expected != found).sum())


def _draws(laws: _Laws) -> int:
    expected, found = _rngs(laws.device)
    law = laws.peaked()
    wrong = _different(expected.sample(law), found.sample(law))
    drawn = (rng.sample_without_replacement(law, CHILDREN) for rng in (expected, found))
    return wrong + _different(*drawn)


def _walk(device: torch.device) -> int:
    """Few tokens, so that paths are long."""
    random = torch.Generator().manual_seed(0)
    parent = torch.tensor([random_parents(NODES, seed=row, levels=LEVELS) for row in range(ROWS)])
    tokens = torch.randint(2, parent.shape, generator=random)
    tokens[:, -2:] = -1
    draws = torch.randint(2, (ROWS, 1 + NODES), generator=random).to(device)
    tree = TreeBatch(*(part.to(device) for part in (tokens, parent, parent, parent.float())))
    row = torch.arange(ROWS, device=device)
    expected = walk(tree, lambda node, active: (draws[row, node + 1], torch.ones_like(active)), levels=LEVELS)
    found = kernels.walk(tree, draws.flatten(), row * (1 + NODES), levels=LEVELS)
    return sum(map(_different, expected, found))


def _rule(laws: _Laws, rule: str) -> int:
    draw = RULES[rule].draw
    assert draw is not None
    p, q = laws.peaked(), laws.peaked()
    p[2] = q[2]
    q[3] = 0
    tokens = _rngs(laws.device)[0].sample_without_replacement(q, CHILDREN)
    tokens[4, 2:] = -1
    tokens[5] = p[5].topk(CHILDREN).indices  # chosen, not drawn
    children = Children(tokens, torch.full_like(tokens[:, 0], CHILDREN), CHILDREN)
    expected, found = _rngs(laws.device)
    fused: Any = kernels.FUSED_RULES[draw]
    return _different(draw(p, q, children, expected), fused(p.clone(), q.clone(), children, found))


class _Table:
    """A draft without a model."""

    def __init__(self, logits: Tensor):
        self.logits, self.read = logits, 1  # [ROWS, slots, V]

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        first, self.read = self.read, self.read + tokens.shape[1]
        return Rows(self.logits[:, first : self.read]), state


class _Drafted:
    """Trees of a fixed shape, and laws of a target near the draft's, so that paths are long."""

    def __init__(self, laws: _Laws, kind: Kind):
        self.kind, self.shape, device = kind, Shape.k_config([3, 2, 1]), laws.device
        self.draft = laws.logits(ROWS, 1 + len(self.shape))
        self.temperature = torch.linspace(0.7, 1.2, ROWS, dtype=torch.float64, device=device)
        self.row = torch.arange(ROWS, device=device)
        request = Request(self.temperature, self.temperature < 0, _rngs(device)[0].fold_in(self.row))
        table, first, nodes = _Table(self.draft), Rows(self.draft[:, :1]), len(self.shape)
        proposer = StaticTree(self.shape, kind=kind)
        self.proposal = draft_tree(proposer, table, first, None, nodes=nodes, request=request)
        self.tree, self.most = self.proposal.tree, proposer.max_children
        self.slot = torch.cat([torch.zeros_like(self.row)[:, None], self.proposal.read], 1).clamp(min=0)
        near = self.draft[self.row[:, None], self.slot] / self.temperature[:, None, None]
        self.target = near + laws.logits(ROWS, 1 + nodes) / 6
        self.root = self.row * (1 + nodes)
        self.among = self.row < ROWS - 1

    def q(self, node: Tensor) -> tuple[Tensor, Tensor]:
        law = (self.draft[self.row, self.slot[self.row, node + 1]] / self.temperature[:, None]).softmax(-1)
        return law, self.proposal.num_planned.gather(1, node[:, None] + 1)[:, 0]

    def p(self, node: Tensor, active: Tensor) -> Tensor:
        return self.target[self.row, node + 1].softmax(-1)

    def different(self, expected: Accepted, found: Accepted) -> int:
        return sum(_different(one[self.among], two[self.among]) for one, two in zip(expected, found, strict=True))


def _traversal(laws: _Laws, kind: Kind) -> int:
    drafted, (ours, theirs) = _Drafted(laws, kind), _rngs(laws.device)
    how: dict[str, Any] = {"levels": drafted.shape.depth, "among": drafted.among}
    rows = drafted.root[:, None] + drafted.slot
    tables = drafted.target.flatten(0, 1), drafted.root, drafted.draft.flatten(0, 1), rows, drafted.temperature
    expected = traversal(drafted.tree, kind, drafted.p, drafted.q, ours, most=drafted.most, **how)
    found = kernels.traversal(drafted.tree, kind, kernels.TraversalInputs(*tables), theirs, **how)
    return drafted.different(expected, found)


def _rejection(laws: _Laws, rule: str) -> int:
    draw = RULES[rule].draw
    assert draw is not None
    drafted, (ours, theirs) = _Drafted(laws, RULES[rule].kinds[0]), _rngs(laws.device)

    def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        q, planned = drafted.q(node)
        children = Children(drafted.tree.children(node, drafted.most), planned, drafted.most)
        return draw(drafted.p(node, active), q, children, ours.fold_in(node + 1)), torch.ones_like(active)

    tables = drafted.target.flatten(0, 1), drafted.root, drafted.draft, drafted.row, drafted.slot, drafted.temperature
    expected = walk(drafted.tree, by_rule, levels=drafted.shape.depth)
    inputs = kernels.RejectionInputs(*tables)
    how: dict[str, Any] = {"levels": drafted.shape.depth, "among": drafted.among}
    return drafted.different(expected, kernels.rejection_walk(drafted.tree, draw, inputs, theirs, **how))
