"""The acceptance of one step: which rows the rule decides, which the target's own draws."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from vllm_adaptive_tree.acceptance import Accepted, Children, traversal, walk
from vllm_adaptive_tree.engine.drafts import Draft, laws
from vllm_adaptive_tree.engine.target import Choose, Target, stacked
from vllm_adaptive_tree.engine.verification import Verification
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.noise import KeyedNoise


class Requests(NamedTuple):
    """What acceptance has to know of the batch; R entries each."""

    own: Tensor  # bool: walk with the target's own draws, whatever the rule
    limit: Tensor  # the most tokens to emit
    seed: Tensor
    position: Tensor  # of the root


def accept(
    pair: Pair, target: Target, step: Verification, drafts: dict[int, Draft], requests: Requests
) -> tuple[Accepted, LogprobsTensors | None]:
    """Walk every tree of the step, by `target_only` or by the rule of the pair."""
    tree, widest = step.batch(), max((one.widest for one in step.trees.values()), default=1)
    vocabulary = target.logits.shape[1]
    noise = KeyedNoise(requests.seed, requests.position, purpose=1)
    by_target, forced = bool(requests.own.all()), None
    if pair.rule.draw is None and not by_target and step.trees:
        forced = traversal(
            tree,
            pair.proposer.kind,
            target.law,
            lambda node: laws(drafts, node, vocabulary),
            noise,
            levels=step.levels,
            most=pair.most,
            among=~requests.own,
            proceed=lambda active: bool(active.any()),
        ).tokens

    def by_rule(node: Tensor) -> Choose:
        def choose(p: Tensor, own: Any) -> Tensor:
            if forced is not None:
                token = forced[:, level]
            elif pair.rule.draw is None:
                token = noise.at(node + 1).choose(p)
            else:
                q, drawn = laws(drafts, node, vocabulary)
                token = pair.rule.draw(
                    p, q, Children(tree.children(node, widest), drawn, pair.most), noise.at(node + 1)
                )
            return torch.where(requests.own, own(), token.clamp(min=0))

        return choose

    level = 0
    logprobs: list[LogprobsTensors] = []

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal level
        output = target.draw(node, active) if by_target else target.draw_by(by_rule(node), node, active)
        if output.logprobs_tensors is not None:
            logprobs.append(output.logprobs_tensors)
        level += 1
        goes_on = level < requests.limit
        if forced is not None and level < forced.shape[1]:
            goes_on &= requests.own | (forced[:, level] >= 0)
        return output.sampled_token_ids[:, 0].long(), goes_on

    accepted = walk(tree, draw, levels=step.levels, proceed=lambda active: bool(active.any()))
    target.close()
    return accepted, stacked(logprobs)
