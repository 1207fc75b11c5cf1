"""Many prompts decoded at once, with the package's own proposers and rules: what the tables are measured with.

The engine's loop without the engine: proposer, rule, RNG and options are those of `methods.resolve`, the models are
read by `llama.Llama`. The target is read along the walk only, which is all that acceptance asks for.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers import dymax  # noqa: F401, registers a method
from benchmarks.papers.drafter import Counted, Drafter
from benchmarks.papers.models import files, greedy_text, held_out_texts, log_likelihood, models, prefilled
from benchmarks.papers.step import Step
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG

RANKS = 32
SEEDS = 1000  # of a draw, at most
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
    keep_likelihood: bool = False
    """Keep the likelihood of the text by the target."""
    draw: int = 0
    """Index of the set of random numbers."""

    def options(self, folder: Path) -> TreeOptions:
        """Options of the engine. `folder`: of the files that the options name ("@name")."""
        tree = {
            key: str(folder / value[1:]) if isinstance(value, str) and value.startswith("@") else value
            for key, value in self.tree.items()
        }
        spec = {"model": "none", "num_speculative_tokens": self.nodes, "rejection_sample_method": self.rule}
        return TreeOptions.parse({**spec, "method": self.method, "tree": tree})[0]


Record = dict[str, list[Any]]
"""Per prompt: `steps`, and sums over these: `tokens` emitted, tree `nodes`, draft `forwards`, `expected` (E(A)), and
how often the root's `first` and `second` child was taken; and the `file` it is from. `ranks`: how often each child of
the root, of all prompts. With `keep_steps`: `each`, pairs (E(A), accepted tokens) of every step. With
`keep_likelihood`: `likelihood`, the sum of the target's log probabilities of the text, at temperature 1."""


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
    source = list(range(len(texts))) if texts else files(cell.prompts)
    texts = texts or held_out_texts(cell.prompts)
    given, logits, *caches = prefilled(texts)
    count, greedy = len(given), cell.temperature == 0
    alive = torch.arange(count)
    target, draft = (cache.of(alive) for cache in caches)
    lengths = torch.tensor([len(one) for one in given])
    # T = 0: the text is known before it is decoded; a step may look as far beyond the last token as its tree is deep
    known = greedy and pair.init_width == 1
    text = greedy_text(texts, cell.tokens + DEEPEST) if known else None
    seed = alive + 1 + SEEDS * cell.draw
    first = logits.argmax(-1)
    if not greedy:
        p = softmax_at(logits, torch.full((count,), cell.temperature))
        first = CounterRNG(seed, lengths - 1, purpose=1).fold_in(torch.zeros_like(alive)).sample(p)
    accepted, root, emitted = first[:, None], lengths, torch.ones_like(alive)
    initial = torch.full((count, pair.init_width), -1) if pair.init_width > 1 else None
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(count, dtype=torch.float64))
    ranks, each, said = torch.zeros(count, RANKS, dtype=torch.int64), list[Any](), [(alive, accepted)]
    while len(alive):
        temperature = torch.full((len(alive),), options.tree.temperature(cell.temperature))
        is_greedy = torch.full((len(alive),), greedy)
        request = Request(temperature, is_greedy, CounterRNG(seed[alive], root, purpose=0), initial)
        drafter, levels = Counted(Drafter(models().draft, draft, root)), list[Tensor]()
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
        ahead = None if text is None else text[alive].gather(1, _ahead(emitted, int(tree.depth.max()) + 1))
        token = accepted.gather(1, (accepted >= 0).sum(1, keepdim=True) - 1)[:, 0]
        step = Step(cell.temperature, target, root, token, ahead, seed[alive])
        below = torch.cat(levels, 1) if levels else torch.empty(0)
        if initial is None:
            result = step.accept(pair, proposal, below, temperature)
        else:
            result, initial = step.accept_longest(pair, proposal, below, temperature, initial)
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
        said.append((alive, accepted))
        on = emitted < cell.tokens - 1  # as vLLM, which drafts nothing for the last token
        if not bool(on.all()):
            kept = on.nonzero()[:, 0]
            alive, accepted, root, emitted = alive[kept], accepted[kept], root[kept], emitted[kept]
            target, draft = target.of(kept), draft.of(kept)
            initial = None if initial is None else initial[kept]
    record: Record = {name: [round(x, 2) for x in value.tolist()] for name, value in sums.items()}
    record |= {"first": ranks[:, 0].tolist(), "second": ranks[:, 1].tolist(), "ranks": ranks.sum(0).tolist()}
    if cell.keep_likelihood:
        record["likelihood"] = log_likelihood(texts, first, _joined(said, count))
    return record | {"file": source} | ({"each": each} if cell.keep_steps else {})


def _ahead(emitted: Tensor, count: int) -> Tensor:
    return emitted[:, None] + torch.arange(count)


def _joined(said: list[tuple[Tensor, Tensor]], count: int) -> list[list[int]]:
    """Tokens emitted after each prompt, but for the first, which no step has added."""
    found: list[list[int]] = [[] for _ in range(count)]
    for alive, tokens in said[1:]:
        for prompt, one in zip(alive.tolist(), tokens.tolist(), strict=True):
            found[prompt] += [token for token in one if token >= 0]
    return found
