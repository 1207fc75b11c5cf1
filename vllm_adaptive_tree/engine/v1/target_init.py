"""Target-initialised trees on Model Runner V1: the last token of a step is held back, and heads the next trees."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.v1.requests import HostRequests
from vllm_adaptive_tree.engine.v1.target import Target
from vllm_adaptive_tree.proposers.children import draw_children


def held_back(accepted: Accepted) -> Accepted:
    """The paths without the last token of each request that emits more than one: the next step may replace it."""
    tokens = accepted.tokens
    count = (tokens >= 0).sum(1, keepdim=True)
    last = (torch.arange(tokens.shape[1]) == count - 1) & (count > 1)
    return accepted._replace(tokens=tokens.masked_fill(last, -1))


def candidates(target: Target, accepted: Accepted, width: int, requests: HostRequests) -> Tensor:
    """Tokens of the next first layer [R, width], -1 pads: the one held back, and alternatives that the target samples
    (its next best for greedy requests)."""
    tokens, nodes = accepted
    count = (nodes >= 0).sum(1)
    first = tokens.gather(1, count[:, None])
    stop = nodes.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    everyone = torch.ones_like(count, dtype=torch.bool)
    rest = target.probs(stop, everyone).scatter(1, first, 0.0)[:, None]
    rng = requests.rng(purpose=2).fold_in(torch.zeros_like(count)[:, None])
    fanout = torch.full_like(rest[:, :, 0], width - 1, dtype=torch.int64)
    greedy = torch.tensor(requests.greedy)
    alternatives = draw_children("without_replacement", rest, fanout, width - 1, rng, greedy)[:, 0]
    return torch.cat([first, alternatives], 1).masked_fill((count == 0)[:, None], -1)
