"""All trees that a proposer may draft, with the inputs of an acceptance rule for them, by enumeration."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.proposers import Proposal, Proposer, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM
from vllm_adaptive_tree.testing.outcomes import ForkingRandom, every_outcome
from vllm_adaptive_tree.trees import TreeBatch


class Drafts(NamedTuple):
    """W trees, each with the inputs of an acceptance rule for it."""

    weight: Tensor  # [W]
    group: Tensor  # [W]: a group is one distribution over trees
    tree: TreeBatch  # [W, N]
    q: Tensor  # [W, 1 + N, V]: of the children of the root (first) and of each node; zeros if there are none
    drawn: Tensor  # [W, 1 + N]
    chosen: Tensor  # [W, N] bool: nodes that a look-up has chosen
    most: int

    def rows(self, index: Tensor) -> "Drafts":
        tree = TreeBatch(*(column[index] for column in self.tree))
        q, drawn, chosen = (part[index] for part in (self.q, self.drawn, self.chosen))
        return Drafts(self.weight[index], self.group[index], tree, q, drawn, chosen, self.most)


def propose(
    proposer: Proposer,
    drafter: ToyDrafter,
    *,
    nodes: int,
    temperature: Sequence[float] | float = 1.0,
    greedy: Sequence[bool] | bool = False,
    chosen: Sequence[bool] | bool | None = None,
    rng: Any = None,
    initial: Tensor | None = None,
    **options: Any,
) -> Proposal:
    """One tree per request of the drafter; without `rng`, the request's number is its seed."""
    rows, state = drafter.catch_up(None, None)
    requests = len(rows.logits)
    request = Request(
        torch.as_tensor(temperature, dtype=rows.logits.dtype).expand(requests),
        torch.as_tensor(greedy).expand(requests),
        keyed(requests) if rng is None else rng,
        initial,
        None if chosen is None else torch.as_tensor(chosen).expand(requests),
    )
    return draft_tree(proposer, drafter, rows, state, nodes=nodes, request=request, **options)


def keyed(seeds: Sequence[int] | int) -> CounterRNG:
    """A random stream per request."""
    seed = torch.tensor(seeds) if isinstance(seeds, Sequence) else torch.arange(seeds)
    return CounterRNG(seed, torch.zeros_like(seed), purpose=0)


def every_draft(
    proposer: Proposer,
    models: Sequence[ToyLM],
    *,
    nodes: int,
    temperature: float = 1.0,
    greedy: bool = False,
    chosen: bool | None = None,
    **how: Any,
) -> Drafts:
    """All trees that `proposer` may draft, one group per model; `how`: for `draft_tree`."""

    def run(rng: ForkingRandom, world: Tensor) -> tuple[Proposal, Tensor, Tensor]:
        levels: list[Tensor] = []
        drafter = ToyDrafter(models, world)
        flags = {"greedy": greedy, "chosen": chosen}
        options = {"nodes": nodes, "temperature": temperature, "rng": rng, **flags, **how}
        proposal = propose(proposer, drafter, keep=levels.append, **options)
        return proposal, *node_probs(proposal, levels, temperature)

    most = min(nodes, proposer.max_children)
    return distinct(
        stacked(
            [
                Drafts(weight, world, proposal.tree, q, drawn, chosen_nodes(proposal), most)
                for weight, world, (proposal, q, drawn) in every_outcome(run, len(models))
            ]
        )
    )


def chosen_nodes(proposal: Proposal) -> Tensor:
    """`chosen` of `Drafts`."""
    return torch.zeros_like(proposal.tree.valid) if proposal.chosen is None else proposal.chosen


def node_probs(proposal: Proposal, levels: Sequence[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """`q` and `drawn` of `Drafts` from the logits [R, W, V] of every level that the drafter read."""
    read = pad(proposal.read, (1, 0))  # the root is number 0
    logits = torch.cat(list(levels), 1)
    logits = logits.gather(1, read.clamp(min=0)[..., None].expand(-1, -1, logits.shape[2]))
    there = read >= 0
    q = softmax_at(logits, torch.tensor(temperature, dtype=logits.dtype))
    return q * there[..., None], proposal.num_planned * there


def every_cut(drafts: Drafts, groups: int) -> Drafts:
    """Every prefix that the scheduler may leave of every tree; the one of `cut` nodes is in group + cut * groups."""
    lengths = range(drafts.tree.tokens.shape[1] + 1)
    return stacked([distinct(cut(drafts, length, groups * length)) for length in lengths])


def cut(drafts: Drafts, length: int | Tensor, group: int = 0) -> Drafts:
    """The first `length` nodes of every tree, [W] if it is not the same for all."""
    limit = torch.as_tensor(length).expand(len(drafts.group))
    kept = pad(torch.arange(drafts.tree.tokens.shape[1]) < limit[:, None], (1, 0), value=True)
    return drafts._replace(
        group=drafts.group + group,
        tree=drafts.tree.cut(limit),
        q=drafts.q * kept[..., None],
        drawn=drafts.drawn * kept,
        chosen=drafts.chosen & kept[:, 1:],
    )


def stacked(drafts: Sequence[Drafts]) -> Drafts:
    weight, group, trees, q, drawn, chosen, most = zip(*drafts, strict=True)
    tree = TreeBatch(*(torch.cat(columns) for columns in zip(*trees, strict=True)))
    weights, groups, qs, counts, flags = map(torch.cat, (weight, group, q, drawn, chosen))
    return Drafts(weights, groups, tree, qs, counts, flags, max(most))


def distinct(drafts: Drafts) -> Drafts:
    """Drafts with equal ones merged; without it the outcomes of drafting and verifying multiply."""
    weight, group, tree, q, drawn, chosen, _ = drafts
    rounded = (q * 1e12).round().long().flatten(1)
    keys = torch.cat([group[:, None], tree.tokens, tree.parent, drawn, chosen, rounded], 1)
    _, which = keys.unique(dim=0, return_inverse=True)
    count = int(which.max()) + 1
    one = torch.empty(count, dtype=torch.int64).scatter_(0, which, torch.arange(len(which)))
    return drafts.rows(one)._replace(weight=torch.zeros(count, dtype=weight.dtype).index_add_(0, which, weight))
