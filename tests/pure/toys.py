"""Toy language models small enough to enumerate, and a random source that takes every branch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from vllm_adaptive_tree.acceptance import RULES, Accepted, Children, Kind, traversal, walk
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.proposers import Proposal, Proposer, Request, base, draft_tree
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.rng import EXHAUSTED, CounterRNG, RandomSource
from vllm_adaptive_tree.trees import TokenTree, TreeBatch

torch.set_num_threads(1)  # many small tensors

T = TypeVar("T")
Path = tuple[int, ...]


class ToyLM:
    """A table with one law per history. History 0 is empty, and history h followed by token x is h * V + 1 + x."""

    def __init__(self, logits: Tensor):
        self.logits = logits  # [H, V]
        self.law = logits.softmax(-1)  # [H, V]
        self.vocabulary = logits.shape[1]

    @classmethod
    def random(
        cls, vocabulary: int, depth: int, *, seed: int, scale: float = 2.0, dtype: torch.dtype = torch.float64
    ) -> Self:
        """Laws for every history of up to `depth` tokens; `scale` makes them sharper."""
        histories = sum(vocabulary**length for length in range(depth + 1))
        generator = torch.Generator().manual_seed(seed)
        return cls(scale * torch.randn(histories, vocabulary, generator=generator, dtype=dtype))

    def history(self, path: Iterable[int]) -> int:
        number = 0
        for token in path:
            number = number * self.vocabulary + 1 + token
        return number

    def probability(self, path: Sequence[int]) -> float:
        result = 1.0
        for depth, token in enumerate(path):
            result *= self.law[self.history(path[:depth]), token].item()
        return result

    def continuations(self, length: int, path: Path = ()) -> Tensor:
        """The law of the next `length` tokens: [V ** length], in lexicographic order."""
        if length == 0:
            return torch.ones(1, dtype=self.law.dtype)
        law = self.law[self.history(path)]
        rest = [self.continuations(length - 1, (*path, token)) for token in range(self.vocabulary)]
        return torch.cat([law[token] * rest[token] for token in range(self.vocabulary)])


class ToyDrafter:
    """The drafter's contract over toy models; its state is the history read by every slot."""

    def __init__(self, models: Sequence[ToyLM], which: Tensor | None = None):
        """`which` [R]: the model of each request, by default one model per request."""
        self.logits = torch.stack([model.logits for model in models])  # [M, H, V]
        self.which = torch.arange(len(models)) if which is None else which
        self.widths: list[int] = []

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Rows, Tensor]:
        return Rows(self.logits[self.which, :1]), torch.zeros_like(self.which)[:, None]

    def grow(self, tokens: Tensor, parent: Tensor, state: Tensor) -> tuple[Rows, Tensor]:
        self.widths.append(tokens.shape[1])
        history = state.gather(1, parent) * self.logits.shape[2] + 1 + tokens.clamp(min=0)  # [R, W]
        logits = self.logits[self.which[:, None], history.masked_fill(tokens < 0, 0)]
        certain = torch.full_like(logits[0, 0], -1e4).index_fill(0, torch.tensor(0), 1e4)
        logits[tokens < 0] = certain  # what an unused slot reads must not matter
        return Rows(logits), torch.cat([state, history], 1)


def propose(
    proposer: Proposer,
    drafter: ToyDrafter,
    *,
    nodes: int,
    temperature: Sequence[float] | float = 1.0,
    greedy: bool = False,
    rng: RandomSource | None = None,
    **options: Any,
) -> Proposal:
    """One tree per request of the drafter; without `rng`, the request's number is its seed."""
    rows, state = drafter.catch_up(None, None)
    requests = torch.arange(len(rows.logits))
    request = Request(
        torch.as_tensor(temperature, dtype=rows.logits.dtype).expand(len(requests)),
        torch.full((len(requests),), greedy),
        rng or CounterRNG(requests, torch.zeros_like(requests), purpose=0),
    )
    return draft_tree(proposer, drafter, rows, state, nodes=nodes, request=request, **options)


def grow_trees(
    models: Sequence[ToyLM],
    *,
    nodes: int,
    max_depth: int,
    threshold: float = 0.0,
    drafter: ToyDrafter | None = None,
    **options: Any,
) -> TreeBatch:
    """OPT-Tree's."""
    proposer = OptTree(max_depth=max_depth, threshold=threshold)
    return propose(proposer, drafter or ToyDrafter(models), nodes=nodes, **options).tree


def on_host(batch: TreeBatch) -> list[TokenTree]:
    """The trees of a batch; what stands behind a tree's last node must be empty."""
    trees = []
    for tokens, parent, depth, weight in zip(*(column.tolist() for column in batch), strict=True):
        size = sum(token >= 0 for token in tokens)
        assert tokens[size:] == parent[size:] == [-1] * (len(tokens) - size)
        assert weight[size:] == [-torch.inf] * (len(tokens) - size)
        tree = TokenTree(tuple(tokens[:size]), tuple(parent[:size]))
        tree.check_integrity()
        assert depth == tree.depths + [0] * (len(tokens) - size)
        trees.append(tree)
    return trees


def on_device(trees: Sequence[TokenTree], width: int | None = None) -> TreeBatch:
    """A batch of any trees; nothing that walks a tree reads the weights."""
    width = width or max(map(len, trees))

    def pad(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    tokens = pad((tree.tokens for tree in trees), -1)
    parent = pad((tree.parents for tree in trees), -1)
    depth = pad((tree.depths for tree in trees), 0)
    return TreeBatch(tokens, parent, depth, torch.zeros(tokens.shape).masked_fill(tokens < 0, -torch.inf))


def paths(tree: TokenTree) -> list[Path]:
    """The tokens from the root to each node."""
    result: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


def random_tree(nodes: int, vocabulary: int, seed: int) -> TokenTree:
    """Every node hangs below an earlier one, or the root, with a token that no sibling has."""
    generator = torch.Generator().manual_seed(seed)
    free = [(parent, token) for parent in range(-1, nodes) for token in range(vocabulary)]
    tokens, parents = [], []
    for node in range(nodes):
        open_now = [slot for slot in free if slot[0] < node]
        parent, token = open_now[int(torch.randint(len(open_now), (), generator=generator))]
        free.remove((parent, token))
        tokens.append(token)
        parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


class ForkingRandom:
    """A random source of R worlds: each follows its script of decisions, then takes the first branch that is open."""

    def __init__(self, script: Tensor):
        self._script = script  # [R, S] ways, -1: open
        self._ways: list[Tensor] = []  # of every decision so far: [R, M]
        self._chances: list[Tensor] = []  # [R, M, ways]

    def fold_in(self, key: Tensor) -> Self:
        return self

    def accept(self, probability: Tensor) -> Tensor:
        return self._decide(torch.stack([probability, 1 - probability], -1)) == 0

    def sample(self, law: Tensor) -> Tensor:
        return self._decide(law)

    def sample_without_replacement(self, law: Tensor, k: int) -> Tensor:
        drawn, left = [], law
        for _ in range(k):
            token = self._decide(left)
            drawn.append(token.masked_fill(left.sum(-1) <= EXHAUSTED * law.sum(-1), -1))
            left = left.scatter(-1, token[..., None], 0.0)
        return torch.stack(drawn, -1)

    def _decide(self, weights: Tensor) -> Tensor:
        """[R, ..., ways] -> [R, ...]; a way of less than rounding's weight is closed."""
        chances = weights.double().flatten(1, -2) if weights.dim() > 2 else weights.double()[:, None]  # [R, M, ways]
        chances = chances / chances.sum(-1, keepdim=True)
        certain = torch.eye(chances.shape[-1], dtype=chances.dtype)[0]  # of nothing, one thing
        chances = torch.where(chances.isfinite().all(-1, keepdim=True) & (chances > EXHAUSTED), chances, 0.0)
        chances = torch.where(chances.sum(-1, keepdim=True) > 0, chances, certain)
        start = sum(ways.shape[1] for ways in self._ways)
        script = self._script[:, start : start + chances.shape[1]]
        script = pad(script, (0, chances.shape[1] - script.shape[1]), value=-1)
        ways = torch.where(script >= 0, script, (chances > 0).int().argmax(-1))
        self._ways.append(ways)
        self._chances.append(chances)
        return ways.view(weights.shape[:-1])

    def _all(self) -> tuple[Tensor, Tensor]:
        """ways [R, D] and chances [R, D, ways] of all decisions"""
        most = max((chances.shape[2] for chances in self._chances), default=0)
        chances = [pad(chances, (0, most - chances.shape[2])) for chances in self._chances]
        return torch.cat(self._ways, 1), torch.cat(chances, 1)

    def weight(self) -> Tensor:
        """[R]"""
        if not self._ways:
            return torch.ones(len(self._script), dtype=torch.float64)
        ways, chances = self._all()
        return chances.gather(2, ways[..., None]).prod(1)[:, 0]

    def others(self) -> tuple[Tensor, Tensor]:
        """The ways not taken, as scripts [R', S'] of worlds to come, and the world [R'] from which each forks off."""
        if not self._ways:
            return torch.empty(0, dtype=torch.int64), self._script[:0]
        ways, chances = self._all()
        decision = torch.arange(ways.shape[1])
        unscripted = pad(self._script, (0, ways.shape[1]), value=-1)[:, : ways.shape[1]] < 0
        other = (chances > 0).scatter(2, ways[..., None], value=False) & unscripted[..., None]
        world, at, way = other.nonzero(as_tuple=True)
        script = torch.where(decision == at[:, None], way[:, None], ways[world])
        return world, script.masked_fill(decision > at[:, None], -1)


def every_outcome(run: Callable[[ForkingRandom, Tensor], T], worlds: int = 1) -> Iterator[tuple[Tensor, Tensor, T]]:
    """`run(rng, world [R])` until no decision of any of the `worlds` is left: weight [R], world [R] and the result.

    Every outcome occurs in exactly one row; the weights of a world add up to 1.
    """
    world, script = torch.arange(worlds), torch.empty(worlds, 0, dtype=torch.int64)
    while len(world):
        random = ForkingRandom(script)
        result = run(random, world)
        yield random.weight(), world, result
        row, script = random.others()
        world = world[row]


class Drafts(NamedTuple):
    """W trees, each with all that an acceptance rule is told of it."""

    weight: Tensor  # [W]
    group: Tensor  # [W]: each group is one law of trees
    tree: TreeBatch  # [W, N]
    q: Tensor  # [W, 1 + N, V]: law of the children of the root (first) and of each node; zeros where there is none
    drawn: Tensor  # [W, 1 + N]
    most: int

    def rows(self, index: Tensor) -> "Drafts":
        tree = TreeBatch(*(column[index] for column in self.tree))
        return Drafts(self.weight[index], self.group[index], tree, self.q[index], self.drawn[index], self.most)


def node_laws(proposal: Proposal, levels: Sequence[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """`q` and `drawn` of `Drafts` from the logits [R, W, V] of every level that the drafter read."""
    read = pad(proposal.read, (1, 0))  # the root is number 0
    logits = torch.cat(list(levels), 1)
    logits = logits.gather(1, read.clamp(min=0)[..., None].expand(-1, -1, logits.shape[2]))
    there = read >= 0
    q = base.softmax_at(logits, torch.tensor(temperature, dtype=logits.dtype))
    return q * there[..., None], proposal.num_planned * there


def every_draft(
    proposer: Proposer,
    models: Sequence[ToyLM],
    *,
    nodes: int,
    temperature: float = 1.0,
    greedy: bool = False,
) -> Drafts:
    """All trees that `proposer` may draft, one group per model."""

    def run(rng: ForkingRandom, world: Tensor) -> tuple[Proposal, Tensor, Tensor]:
        levels: list[Tensor] = []
        drafter = ToyDrafter(models, world)
        options = {"nodes": nodes, "temperature": temperature, "greedy": greedy, "rng": rng}
        proposal = propose(proposer, drafter, keep=levels.append, **options)
        return proposal, *node_laws(proposal, levels, temperature)

    most = min(nodes, proposer.max_children)
    return distinct(
        stacked(
            [
                Drafts(weight, world, proposal.tree, q, drawn, most)
                for weight, world, (proposal, q, drawn) in every_outcome(run, len(models))
            ]
        )
    )


def every_cut(drafts: Drafts, groups: int) -> Drafts:
    """Every prefix that the scheduler may leave of every tree; the one of `cut` nodes is in group + cut * groups."""
    lengths = range(drafts.tree.tokens.shape[1] + 1)
    return stacked([distinct(cut(drafts, length, groups * length)) for length in lengths])


def stacked(drafts: Sequence[Drafts]) -> Drafts:
    weight, group, trees, q, drawn, most = zip(*drafts, strict=True)
    tree = TreeBatch(*(torch.cat(columns) for columns in zip(*trees, strict=True)))
    return Drafts(torch.cat(weight), torch.cat(group), tree, torch.cat(q), torch.cat(drawn), max(most))


def cut(drafts: Drafts, length: int | Tensor, group: int = 0) -> Drafts:
    """The first `length` nodes of every tree, [W] if it is not the same for all."""
    limit = torch.as_tensor(length).expand(len(drafts.group))
    kept = pad(torch.arange(drafts.tree.tokens.shape[1]) < limit[:, None], (1, 0), value=True)
    return drafts._replace(
        group=drafts.group + group,
        tree=drafts.tree.cut(limit),
        q=drafts.q * kept[..., None],
        drawn=drafts.drawn * kept,
    )


def distinct(drafts: Drafts) -> Drafts:
    """Equal ones are merged; without it the outcomes of drafting and verifying multiply."""
    weight, group, tree, q, drawn, _ = drafts
    laws = (q * 1e12).round().long().flatten(1)
    keys = torch.cat([group[:, None], tree.tokens, tree.parent, drawn, laws], 1)
    _, which = keys.unique(dim=0, return_inverse=True)
    count = int(which.max()) + 1
    one = torch.empty(count, dtype=torch.int64).scatter_(0, which, torch.arange(len(which)))
    return drafts.rows(one)._replace(weight=torch.zeros(count, dtype=weight.dtype).index_add_(0, which, weight))


class Emitted(NamedTuple):
    law: Tensor  # [G, V ** length]: of the tokens of a step, continued by the target
    accepted: Tensor  # [G]: drafted tokens among them, on average


def emitted(drafts: Drafts, targets: Sequence[ToyLM], rule: str, kind: Kind, *, length: int) -> Emitted:
    """What `rule` makes of all the trees of each group for targets[group % len(targets)], by enumeration."""
    vocabulary = targets[0].vocabulary
    groups, model = int(drafts.group.max()) + 1, drafts.group % len(targets)
    p = torch.stack([target.law for target in targets])[model[:, None], histories(drafts.tree, vocabulary)]
    sequences = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).view(-1, length)
    plain = torch.stack([conditionals(target, sequences) for target in targets])  # [M, S, length]
    law = torch.zeros(groups, len(sequences), dtype=torch.float64)
    accepted = torch.zeros(groups, dtype=torch.float64)

    def run(rng: ForkingRandom, world: Tensor) -> tuple[Tensor, Tensor]:
        ends = Postponed(rng)
        own = rng if RULES[rule].draw else ends
        tokens, nodes = verify(drafts.rows(world), p[world], rule, kind, own)
        return ends.laws_of(tokens, vocabulary), (nodes >= 0).sum(1)

    for weight, world, (given, count) in every_outcome(run, len(drafts.weight)):
        weight = weight * drafts.weight[world]
        chance = weight[:, None].expand(-1, len(sequences))
        for at in range(length):
            token = sequences[:, at]
            by_target = plain[model[world], :, at]
            here = given[:, at] if at < given.shape[1] else torch.zeros_like(given[:, 0])  # [R, V]
            chance = chance * torch.where(here.any(1, keepdim=True), here[:, token], by_target)
        law.index_add_(0, drafts.group[world], chance)
        accepted.index_add_(0, drafts.group[world], weight * count)
    assert (law.sum(1) - 1).abs().max() < 1e-5, "every outcome has its weight"
    return Emitted(law, accepted)


def histories(tree: TreeBatch, vocabulary: int) -> Tensor:
    """The number of the history that ends at the root (first) and at each node: [R, 1 + N]."""
    result = torch.zeros_like(pad(tree.tokens, (1, 0)))
    for node in range(tree.tokens.shape[1]):
        above = result.gather(1, tree.parent[:, node, None] + 1)[:, 0]
        result[:, node + 1] = torch.where(tree.valid[:, node], above * vocabulary + 1 + tree.tokens[:, node], 0)
    return result


def conditionals(model: ToyLM, sequences: Tensor) -> Tensor:
    """The probability of every token of the sequences [S, L] behind those before it: [S, L]."""
    history, result = torch.zeros_like(sequences[:, 0]), []
    for token in sequences.unbind(1):
        result.append(model.law.double()[history, token])
        history = history * model.vocabulary + 1 + token
    return torch.stack(result, 1)


class Postponed:
    """A random source whose `sample` answers with a number beyond the vocabulary, which stands for the law.

    Traversal draws one token, the last, but asks at every turn; forking there would not end.
    """

    def __init__(self, rng: ForkingRandom):
        self.rng, self.laws = rng, list[Tensor]()

    def fold_in(self, key: Tensor) -> Self:
        return self

    def accept(self, probability: Tensor) -> Tensor:
        return self.rng.accept(probability)

    def sample(self, law: Tensor) -> Tensor:
        self.laws.append(law)
        return torch.full((len(law),), law.shape[1] + len(self.laws) - 1)

    def laws_of(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """The law [R, T, V] of every token [R, T], one-hot where it is known; zeros where there is none."""
        laws = one_hot(tokens.clamp(0, vocabulary - 1), vocabulary).double()
        if self.laws:
            row = torch.arange(len(tokens))[:, None]
            unknown = torch.stack(self.laws)[(tokens - vocabulary).clamp(min=0), row]
            laws = torch.where(tokens[..., None] < vocabulary, laws, unknown)
        return laws * (tokens >= 0)[..., None]


def verify(drafts: Drafts, p: Tensor, rule: str, kind: Kind, rng: RandomSource) -> Accepted:
    """One step as the engine takes it, for the target's laws p [R, 1 + N, V] behind the root and every node."""
    tree, row = drafts.tree, torch.arange(len(p))
    levels, most, draw = int(tree.depth.max()), drafts.most, RULES[rule].draw
    widest = max(1, min(most, int(tree.valid.sum(1).max())))  # of the trees around too

    def p_rows(node: Tensor, active: Tensor) -> Tensor:
        nothing = torch.eye(p.shape[2], dtype=p.dtype)[0]  # no outcome of a walk that has ended forks
        return torch.where(active[:, None], p[row, node + 1], nothing)

    def q_rows(node: Tensor) -> tuple[Tensor, Tensor]:
        return drafts.q[row, node + 1], drafts.drawn[row, node + 1]

    def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        assert draw is not None
        q, drawn = q_rows(node)
        children = Children(tree.children(node, widest).masked_fill(~active[:, None], -1), drawn, most)
        return draw(p_rows(node, active), q, children, rng.fold_in(node + 1)), torch.ones_like(active)

    if draw is not None:
        return walk(tree, by_rule, levels=levels)
    path = traversal(tree, kind, p_rows, q_rows, rng, levels=levels, most=most).tokens
    return replayed(tree, path)


def replayed(tree: TreeBatch, path: Tensor) -> Accepted:
    """The walk along a path [R, L + 1] that is known already."""
    level = iter(range(path.shape[1]))
    goes_on = pad(path, (0, 1), value=-1)[:, 1:] >= 0

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        at = next(level)
        return path[:, at], goes_on[:, at]

    return walk(tree, draw, levels=path.shape[1] - 1)
