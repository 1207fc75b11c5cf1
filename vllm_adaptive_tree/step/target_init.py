"""Target initialisation (Lu et al., arXiv 2409.10644): a step's last token is held back, and heads the next tree."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.step.ports import Requests, Target


def held_back(accepted: Accepted) -> Accepted:
    """The paths without the last token of each request that emits more than one: the next step may replace it."""
    tokens = accepted.tokens
    count = (tokens >= 0).sum(1, keepdim=True)
    last = (torch.arange(tokens.shape[1], device=tokens.device) == count - 1) & (count > 1)
    return accepted._replace(tokens=tokens.masked_fill(last, -1))


def candidates(target: Target[Any], accepted: Accepted, width: int, requests: Requests) -> Tensor:
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
    alternatives = draw_children("without_replacement", rest, fanout, width - 1, rng, requests.greedy)[:, 0]
    return torch.cat([first, alternatives], 1).masked_fill((count == 0)[:, None], -1)
