"""Flags of a request that decide how it is drafted and accepted, from its sampling parameters."""

from typing import Any

import numpy as np

from vllm_adaptive_tree.acceptance import TargetOnly
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.node_quota import nodes_per_request
from vllm_adaptive_tree.engine.common.request_options import CHOSEN, DRAWN, WHERE, RequestOptions
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.options import MOST

GREEDY = 1e-5  # vLLM samples at higher temperatures only


def is_greedy(sampling: Any) -> bool:
    return bool(sampling.temperature < GREEDY)


def most_nodes(sampling: Any) -> int:
    """Most nodes of a request's trees, if it says so; 0: it has none."""
    asked = RequestOptions.of(sampling).nodes
    return MOST if asked is None else asked


def draws_from_target(sampling: Any, pair: Pair, options: TreeOptions) -> bool:
    """Return whether a request walks with the target's own draws, whatever the rule of the pair.

    Greedy requests do, those whose children are chosen, and under `auto` those with a seed of their own, unless they
    ask for the draws of the rule.
    """
    if pair.rule is TargetOnly or is_greedy(sampling):
        return True
    asked, either = RequestOptions.of(sampling), pair.proposer.either
    chosen = asked.kind == CHOSEN if asked.kind and either else pair.proposer.chooses(sampling.temperature)
    return chosen or (options.rejection_sample_method == "auto" and sampling.seed is not None and asked.seed is None)


def check_request(sampling: Any, pair: Pair, options: TreeOptions, varying: str | None) -> None:
    """Check what a request asks for. `varying`: why trees follow from more than the text of their request, if so.

    Raises:
        ValueError: the engine cannot give it; names the key and the remedy.
    """
    asked, proposer = RequestOptions.of(sampling), pair.proposer
    from_target = draws_from_target(sampling, pair, options)
    if asked.kind is not None:
        kinds = [CHOSEN if proposer.kind == "one_hot" else DRAWN]
        if proposer.either:
            kinds = [CHOSEN] if pair.rule is TargetOnly else [CHOSEN, DRAWN]
        if asked.kind not in kinds:
            raise ValueError(
                f"{WHERE}['kind'] is {asked.kind!r}, and children of {options.method!r} with {pair.rule_name!r} are "
                f"{kinds[0]!r}: remove it; 'adaptive_tree' has both"
            )
        if asked.kind == DRAWN and proposer.either and from_target:
            raise ValueError(
                f"{WHERE}['kind'] is {DRAWN!r}, and the tokens of a request with temperature 0 or a seed are the "
                "target's own draws, for which children are chosen: remove it, or the seed"
            )
    if asked.seed is not None:
        if sampling.seed is None:
            raise ValueError(f"{WHERE}['seed'] is {asked.seed!r}, and the request has no seed: give it one")
        if varying is not None and not from_target:
            raise ValueError(
                f"{WHERE}['seed'] is {asked.seed!r}, which needs trees that follow from the text alone, and {varying}. "
                "Without it a seed gives the same text in any case"
            )


def varying(pair: Pair, options: TreeOptions, *, requests: int, room: int, most: int | None = None) -> str | None:
    """Why trees of a pair follow from more than the text of their request, in words; None: they do not.

    `requests`, `room`: max_num_seqs and the tokens of a step; `most`: requests of a batch that have trees, None: all.
    """
    nodes, tree = options.num_speculative_tokens, options.tree
    if tree.budget is not None:
        return "a budget cuts them: start the engine with tree: {'budget': null}"
    if pair.proposer.acceptance is not None:
        return f"{options.method!r} learns from all requests: start the engine with another method"
    if any(tree.steered):
        return f"'auto' steers {options.method!r}: start the engine with numbers in its place"
    if most is not None and requests > most:
        return f"a batch of more than {most} requests has none: start the engine with a smaller max_num_seqs"
    if nodes_per_request(running=requests, nodes=nodes, room=room) < nodes:
        return (
            f"{requests} requests have no room for {nodes} nodes each: start the engine with a smaller max_num_seqs, "
            "or more max_num_batched_tokens"
        )
    return None


class RequestFlags:
    """Flags of many requests on the host: [requests] bool by vLLM's index of the request."""

    def __init__(self, requests: int, pair: Pair, options: TreeOptions):
        self.pair, self.options = pair, options
        self.greedy, self.from_target = (np.zeros(requests, dtype=bool) for _ in range(2))
        self.nodes = np.full(requests, MOST)
        """Most nodes of its trees, [requests]; 0: it has none."""

    def add(self, request: int, sampling: Any) -> None:
        self.greedy[request] = is_greedy(sampling)
        self.from_target[request] = draws_from_target(sampling, self.pair, self.options)
        self.nodes[request] = most_nodes(sampling)
