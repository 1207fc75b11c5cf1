"""The acceptance of one step: by the pair's rule, or with the target's own draws."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from vllm_adaptive_tree.acceptance import Accepted, Children, longest_continuation, traversal, walk
from vllm_adaptive_tree.engine.v1.drafts import Draft, draft_probs
from vllm_adaptive_tree.engine.v1.target import Choose, Target, stacked
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.rng import CounterRNG


class Requests(NamedTuple):
    """The requests of the batch; R entries each."""

    from_target: Tensor  # bool: walk with the target's own draws, whatever the rule
    greedy: Tensor  # bool: those draws are its argmax
    seed: Tensor
    position: Tensor  # of the root


class Outcome(NamedTuple):
    accepted: Accepted
    logprobs: LogprobsTensors | None
    initial: Tensor | None  # [R, W]: with target initialisation the first layer of the next tree, -1 pads


def accept(
    pair: Pair,
    target: Target,
    step: Verification,
    drafts: dict[int, Draft],
    limit: list[int],
    known: Callable[[], Requests],
) -> Outcome:
    """Walk every tree of the step, with the target's own draws or by the rule of the pair.

    `limit` [R]: the most tokens to emit; `known`: gives the requests, if they are needed.
    """
    if pair.init_width == 1 and (best := target.best()) is not None:
        return Outcome(_along(best, target.first.tolist(), step, limit), None, None)
    rule, most = _Rule(pair, target, step, drafts, known()), torch.tensor(limit)
    tree, requests = rule.tree, rule.requests
    by_target, own, forced = bool(requests.from_target.all()), requests.from_target, None
    if pair.init_width > 1:  # the longest of several walks; the walk below repeats it
        initial = torch.tensor([drafts[r].initial if r in drafts else 0 for r in range(len(own))])
        forced = longest_continuation(tree, initial, rule.draw, levels=step.levels, most=pair.init_width, proceed=_any)
        by_target, own = False, torch.zeros_like(own)
    elif pair.rule.draw is None and not by_target and step.trees:
        forced = traversal(
            tree,
            pair.proposer.kind,
            target.probs,
            rule.draft_probs,
            rule.rng,
            levels=step.levels,
            most=pair.most,
            among=~own,
            proceed=_any,
        )

    level = 0
    logprobs: list[LogprobsTensors] = []

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal level
        if by_target:
            output = target.draw(node, active)
        else:
            token = None if forced is None else forced.tokens[:, level].clamp(min=0)
            choose = rule.choice(node) if token is None else lambda p, draw: torch.where(own, draw(), token)
            output = target.draw_by(choose, node, active, greedy=pair.init_width > 1)
        if output.logprobs_tensors is not None:
            logprobs.append(output.logprobs_tensors)
        level += 1
        goes_on = level < most
        if forced is not None and level < forced.tokens.shape[1]:
            goes_on &= own | (forced.tokens[:, level] >= 0)
        return output.sampled_token_ids[:, 0].long(), goes_on

    accepted = walk(tree, draw, levels=step.levels, proceed=_any)
    candidates = _candidates(target, accepted, pair.init_width, requests) if pair.init_width > 1 else None
    target.close()
    return Outcome(accepted, stacked(logprobs), candidates)


def _along(best: list[int], first: list[int], step: Verification, limit: list[int]) -> Accepted:
    """The walk of a batch with known samples: `best` at every row, `first`: the row of each root, [R]."""
    paths = []
    for request, (root, most) in enumerate(zip(first, limit, strict=True)):
        tree = step.trees.get(request)
        paths.append([] if tree is None else tree.follow(best[root : root + 1 + len(tree)])[: most - 1])
    length = 1 + max(map(len, paths))
    tokens = [
        [best[root + 1 + node] for node in (-1, *path)] + [-1] * (length - 1 - len(path))
        for root, path in zip(first, paths, strict=True)
    ]
    nodes = [path + [-1] * (length - len(path)) for path in paths]
    return Accepted(torch.tensor(tokens), torch.tensor(nodes))


def held(tokens: Tensor) -> Tensor:
    """[R, L]: the last token of each request that emits more than one, which the next step may replace."""
    count = (tokens >= 0).sum(1, keepdim=True)
    return (torch.arange(tokens.shape[1]) == count - 1) & (count > 1)


class _Rule:
    """The rule of the pair as a draw at the nodes of one step."""

    def __init__(self, pair: Pair, target: Target, step: Verification, drafts: dict[int, Draft], requests: Requests):
        self.pair, self.target, self.drafts, self.requests = pair, target, drafts, requests
        self.tree, self.max_fanout = step.batch(), max((one.max_fanout for one in step.trees.values()), default=1)
        self.rng = CounterRNG(requests.seed, requests.position, purpose=1)

    def draft_probs(self, node: Tensor) -> tuple[Tensor, Tensor]:
        return draft_probs(self.drafts, node, self.target.logits.shape[1])

    def choice(self, node: Tensor) -> Choose:
        def choose(p: Tensor, own: Callable[[], Tensor]) -> Tensor:
            rng = self.rng.fold_in(node + 1)
            if self.pair.rule.draw is None:
                token = rng.sample(p)
            else:
                q, planned = self.draft_probs(node)
                children = Children(self.tree.children(node, self.max_fanout), planned, self.pair.most)
                token = self.pair.rule.draw(p, q, children, rng)
            return torch.where(self.requests.from_target, own(), token.clamp(min=0))

        return choose

    def draw(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """For `longest_continuation`, greedy requests too."""
        output = self.target.draw_by(self.choice(node), node, active, greedy=True)
        return output.sampled_token_ids[:, 0].long(), torch.ones_like(active)


def _candidates(target: Target, accepted: Accepted, width: int, requests: Requests) -> Tensor:
    """[R, width]: the token held back, and others that the target samples in its place (its next best if greedy)."""
    tokens, nodes = accepted
    count = (nodes >= 0).sum(1)
    first = tokens.gather(1, count[:, None])
    stop = nodes.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    everyone = torch.ones_like(count, dtype=torch.bool)
    rest = target.probs(stop, everyone, greedy=True).scatter(1, first, 0.0)[:, None]
    rng = CounterRNG(requests.seed, requests.position, purpose=2).fold_in(torch.zeros_like(count)[:, None])
    fanout = torch.full_like(rest[:, :, 0], width - 1, dtype=torch.int64)
    others = draw_children("without_replacement", rest, fanout, width - 1, rng, requests.greedy)[:, 0]
    return torch.cat([first, others], 1).masked_fill((count == 0)[:, None], -1)


def _any(active: Tensor) -> bool:
    return bool(active.any())
