"""Many prompts decoded at once, with the package's own proposers and rules: what the tables are measured with.

The engine's loop without the engine: proposer, rule, RNG and options are those of `methods.resolve`, the models are
read by `llama.Llama`. The target is read along the walk only, which is all that acceptance asks for.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.papers.llama import Cache, Llama
from benchmarks.tokens_per_step import PAIR, prompts
from vllm_adaptive_tree.acceptance import Accepted, Children, traversal, walk
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.methods import Pair, resolve
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import TreeBatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RANKS = 32
DEEPEST = 32  # levels of a tree, at most


@dataclass(frozen=True)
class Cell:
    """One measurement: a method and a rule at a temperature."""

    method: str
    nodes: int
    temperature: float = 0.0
    rule: str = "target_only"
    tree: dict[str, Any] = field(default_factory=dict)
    prompts: int = 64
    tokens: int = 128
    shipped: str = ""
    """Checksum of the bundled gate or vector that it uses, or of the training of another one: another file is another
    cell."""
    keep_steps: bool = False
    """Keep E(A) and the accepted tokens of every step."""

    def options(self, folder: Path) -> TreeOptions:
        """`folder`: where the files of the options ("@name") are."""
        tree = {
            key: str(folder / value[1:]) if isinstance(value, str) and value.startswith("@") else value
            for key, value in self.tree.items()
        }
        spec = {"model": "none", "num_speculative_tokens": self.nodes, "rejection_sample_method": self.rule}
        return TreeOptions.parse({**spec, "method": self.method, "tree": tree})[0]


Record = dict[str, list[Any]]
"""Per prompt: `steps`, and sums over these: `tokens` emitted, tree `nodes`, draft `forwards`, `expected` (E(A)), and
how often the root's `first` and `second` child was taken. `ranks`: how often each child of the root, of all prompts.
With `keep_steps`: `each`, pairs (E(A), accepted tokens) of every step."""


class Models:
    def __init__(self) -> None:
        self.target, self.draft = Llama(PAIR / "target"), Llama(PAIR / "draft")
        self.tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenizer(text)["input_ids"] for text in texts]


@lru_cache(maxsize=1)
def models() -> Models:
    return Models()


@lru_cache(maxsize=2)
def _prefilled(texts: tuple[str, ...]) -> tuple[list[list[int]], Tensor, Cache, Cache]:
    """Tokens, the target's logits [R, V] behind the last token of each prompt, and both caches."""
    pair = models()
    tokens = pair.encode(list(texts))
    longest = max(map(len, tokens))
    padded = torch.tensor([[*one, *[-1] * (longest - len(one))] for one in tokens])
    positions = torch.arange(longest).expand_as(padded)
    visible = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(tokens), -1, -1)
    caches, hidden = [], []
    for model in (pair.target, pair.draft):
        caches.append(model.empty(len(tokens)))
        hidden.append(model.read(caches[-1], padded, positions, positions, visible, None))
    last = hidden[0][torch.arange(len(tokens)), (padded >= 0).sum(1) - 1]
    return tokens, pair.target.logits(last), *caches


@lru_cache(maxsize=2)
def _greedy_text(texts: tuple[str, ...], tokens: int) -> Tensor:
    """What the target says greedily behind each prompt: [R, tokens]."""
    given, logits, cache, _ = _prefilled(texts)
    position = torch.tensor([len(one) for one in given])
    cache = cache.of(torch.arange(len(given)))
    said = [logits.argmax(-1)]
    for _ in range(tokens - 1):
        hidden = _read_one(models().target, cache, said[-1], position, torch.arange(len(given)))
        said.append(models().target.logits(hidden).argmax(-1))
        position = position + 1
    return torch.stack(said, 1)


@lru_cache
def held_out_texts(count: int) -> tuple[str, ...]:
    return tuple(prompts(count))


def _read_one(model: Llama, cache: Cache, token: Tensor, position: Tensor, requests: Tensor) -> Tensor:
    """Hidden states [R, H] of one more token each, behind all places before its own."""
    visible = torch.arange(int(position.max()) + 1) <= position[:, None, None]
    position = position[:, None]
    return model.read(cache, token[:, None], position, position, visible, requests)[:, 0]


class Drafter:
    """`drafters.Drafter` over `Llama`; slot s of a tree lies s places behind the root."""

    def __init__(self, model: Llama, cache: Cache, root: Tensor):
        self.model, self.cache, self.root = model, cache, root  # root: its position [R]

    def catch_up(self, accepted: Tensor, target_hidden: Tensor | None = None) -> tuple[Rows, tuple[Tensor, Tensor]]:
        """`accepted` [R, A]: the last tokens up to the root, -1 behind."""
        count = (accepted >= 0).sum(1)
        place = self.root[:, None] + 1 - count[:, None] + torch.arange(accepted.shape[1])
        place = torch.where(accepted >= 0, place, 0)
        visible = torch.arange(int(self.root.max()) + 1) <= place[:, :, None]
        hidden = self.model.read(self.cache, accepted, place, place, visible, None)
        hidden = hidden[torch.arange(len(count)), count - 1][:, None]
        ancestors = torch.ones(len(count), 1, 1, dtype=torch.bool)  # [R, slots, slots]
        return Rows(self.model.logits(hidden), hidden), (ancestors, torch.zeros(len(count), 1, dtype=torch.int64))

    def grow(self, tokens: Tensor, parent: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Rows, tuple[Tensor, Tensor]]:
        above, depth = state
        requests, width = tokens.shape
        slots = above.shape[1]
        new = torch.eye(width, dtype=torch.bool).expand(requests, -1, -1)
        new = torch.cat([above.gather(1, parent[:, :, None].expand(-1, -1, slots)), new], 2)  # [R, W, slots + W]
        above = torch.cat([torch.nn.functional.pad(above, (0, width)), new], 1)
        own = depth.gather(1, parent) + 1
        slot = torch.arange(int(self.root.max()) + slots + width) - self.root[:, None]  # [R, S]
        seen = new.gather(2, slot.clamp(0, slots + width - 1)[:, None].expand(-1, width, -1))
        visible = (slot <= 0)[:, None] | (seen & (slot < slots + width)[:, None])
        places = self.root[:, None] + slots + torch.arange(width)
        hidden = self.model.read(self.cache, tokens, self.root[:, None] + own, places, visible, None)
        return Rows(self.model.logits(hidden), hidden), (above, torch.cat([depth, own], 1))


class _Counted:
    """Counts the forwards that each request took part in."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.forwards = drafter, torch.ones_like(drafter.root)

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Rows, Any]:
        return self.drafter.catch_up(accepted, target_hidden)

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        self.forwards = self.forwards + (tokens >= 0).any(1)
        return self.drafter.grow(tokens, parent, state)


class Step:
    """One step of R requests: what acceptance asks for, read when it is asked."""

    def __init__(self, cell: Cell, cache: Cache, root: Tensor, token: Tensor, text: Tensor | None):
        self.temperature, self.cache, self.root, self.token, self.text = cell.temperature, cache, root, token, text

    def accept(self, pair: Pair, proposal: Proposal, below: Tensor, temperature: Tensor, rng: CounterRNG) -> Accepted:
        self.tree, self.below, self.proposal, self.q_temperature = proposal.tree, below, proposal, temperature
        levels = int(self.tree.depth.max())
        if pair.rule.draw is None:
            return traversal(
                self.tree,
                pair.proposer.kind,
                self.p,
                self.q,
                rng,
                levels=levels,
                most=pair.most,
                proceed=lambda active: bool(active.any()),
            )
        draw, ignores_q = pair.rule.draw, pair.rule_name == "target_only"
        widest = max(_widest(self.tree), 1)

        def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            p = self.p(node, active)
            if ignores_q:
                q, children = p, Children(node[:, None], node, pair.most)
            else:
                q, drawn = self.q(node)
                children = Children(self.tree.children(node, widest), drawn, pair.most)
            return draw(p, q, children, rng.fold_in(node + 1)), active

        return walk(self.tree, by_rule, levels=levels, proceed=lambda active: bool(active.any()))

    def p(self, node: Tensor, active: Tensor) -> Tensor:
        """Target law [R, V] behind `node` [R]; uniform where not active."""
        at = node.clamp(min=0)[:, None]
        depth = torch.where(node < 0, 0, self.tree.depth.gather(1, at)[:, 0])
        vocabulary = models().target.embedding.shape[0]
        if self.text is not None:
            said = self.text.gather(1, depth[:, None])
            return torch.zeros(len(node), vocabulary).scatter(1, said, 1.0)
        token = torch.where(node < 0, self.token, self.tree.tokens.gather(1, at)[:, 0])
        asked = active.nonzero()[:, 0]
        laws = torch.full((len(node), vocabulary), 1 / vocabulary)
        if len(asked):
            position = (self.root + depth)[asked]
            hidden = _read_one(models().target, self.cache, token[asked], position, asked)
            laws[asked] = softmax_at(models().target.logits(hidden), torch.full((len(asked),), self.temperature))
        return laws

    def q(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Draft law [R, V] behind `node` [R], zero where it was never read, and how many children were planned [R]."""
        slot = torch.where(node < 0, 0, self.proposal.read.gather(1, node.clamp(min=0)[:, None])[:, 0])
        q = softmax_at(self.below[torch.arange(len(node)), slot.clamp(min=0)], self.q_temperature)
        drawn = self.proposal.num_planned.gather(1, node[:, None] + 1)[:, 0]
        return q.masked_fill((slot < 0)[:, None], 0.0), drawn.masked_fill(slot < 0, 0)


def _widest(tree: TreeBatch) -> int:
    """The most children of a node."""
    children = torch.zeros(len(tree.tokens), tree.tokens.shape[1] + 1)
    return int(children.scatter_add(1, tree.parent + 1, tree.valid.float()).max())


def _agree(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    used = (frontier.tokens >= 0).any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 0
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), width > 0


@torch.inference_mode()
def measure(
    cell: Cell,
    folder: Path = Path(),
    *,
    texts: tuple[str, ...] = (),
    look: Callable[[Proposal, Tensor, Accepted, Tensor], None] | None = None,
) -> Record:
    """Decode `cell.tokens` tokens behind every held-out prompt.

    Args:
        folder: of the files that the options name.
        texts: prompts other than the held-out ones.
        look: is given every step's trees, the draft's logits [R, slots, V], what was accepted, and the numbers of
            their prompts [R].
    """
    pair = resolve(options := cell.options(folder))
    texts = texts or held_out_texts(cell.prompts)
    given, logits, *caches = _prefilled(texts)
    count, greedy = len(given), cell.temperature == 0
    alive = torch.arange(count)
    target, draft = (cache.of(alive) for cache in caches)
    lengths = torch.tensor([len(one) for one in given])
    # T = 0: the text is known before it is decoded; a step may look as far beyond the last token as its tree is deep
    text = _greedy_text(texts, cell.tokens + DEEPEST) if greedy else None
    seed = alive + 1
    first = logits.argmax(-1)
    if not greedy:
        p = softmax_at(logits, torch.full((count,), cell.temperature))
        first = CounterRNG(seed, lengths - 1, purpose=1).fold_in(torch.zeros_like(alive)).sample(p)
    accepted, root, emitted = first[:, None], lengths, torch.ones_like(alive)
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(count, dtype=torch.float64))
    ranks, each = torch.zeros(count, RANKS, dtype=torch.int64), list[Any]()
    while len(alive):
        temperature = torch.full((len(alive),), options.tree.temperature(cell.temperature))
        is_greedy = torch.full((len(alive),), greedy)
        request = Request(temperature, is_greedy, CounterRNG(seed[alive], root, purpose=0))
        drafter, levels = _Counted(Drafter(models().draft, draft, root)), list[Tensor]()
        rows, state = drafter.catch_up(accepted, None)
        proposal = draft_tree(
            pair.proposer,
            drafter,
            rows,
            state,
            nodes=cell.nodes,
            request=request,
            agree=_agree,
            keep=levels.append if pair.rule_name != "target_only" or look else lambda _: None,
        )
        tree = proposal.tree
        said = None if text is None else text[alive].gather(1, _ahead(emitted, int(tree.depth.max()) + 1))
        token = accepted.gather(1, (accepted >= 0).sum(1, keepdim=True) - 1)[:, 0]
        step = Step(cell, target, root, token, said)
        below = torch.cat(levels, 1) if levels else torch.empty(0)
        result = step.accept(pair, proposal, below, temperature, CounterRNG(seed[alive], root, purpose=1))
        if look:
            look(proposal, below, result, alive)
        length = (result.tokens >= 0).sum(1)
        expected = tree.log_weight.exp().sum(1)
        figures = {
            "steps": torch.ones_like(length),
            "tokens": length,
            "nodes": tree.valid.sum(1),
            "forwards": drafter.forwards,
            "expected": expected,
        }
        for name, value in figures.items():
            sums[name][alive] += value.double()
        taken = result.nodes[:, 0]
        earlier = (tree.parent < 0) & tree.valid & (torch.arange(tree.tokens.shape[1]) < taken[:, None])
        ranks[alive, earlier.sum(1).clamp(max=RANKS - 1)] += taken >= 0
        if cell.keep_steps:
            each += zip([round(e, 2) for e in expected.tolist()], (length - 1).tolist(), strict=True)
        width = int(length.max())
        accepted, root, emitted = result.tokens[:, :width], root + length, emitted + length
        on = emitted < cell.tokens - 1  # as vLLM, which drafts nothing for the last token
        if not bool(on.all()):
            kept = on.nonzero()[:, 0]
            alive, accepted, root, emitted = alive[kept], accepted[kept], root[kept], emitted[kept]
            target, draft = target.of(kept), draft.of(kept)
    record: Record = {name: [round(x, 2) for x in value.tolist()] for name, value in sums.items()}
    record |= {"first": ranks[:, 0].tolist(), "second": ranks[:, 1].tolist(), "ranks": ranks.sum(0).tolist()}
    return record | ({"each": each} if cell.keep_steps else {})


def _ahead(emitted: Tensor, count: int) -> Tensor:
    return emitted[:, None] + torch.arange(count)
