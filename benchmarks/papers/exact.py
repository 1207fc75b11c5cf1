"""Acceptance of two drafts at one node, in closed form over batches of laws, and where the tables need it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.papers.models import held_out_texts, models, prefilled, read_one
from benchmarks.papers.optimal import optimal_acceptance
from benchmarks.tokens_per_step import files
from vllm_adaptive_tree.acceptance.hub import without_argmax
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.rng import CounterRNG


class Accepted(NamedTuple):
    first: Tensor  # [B]: probability that the first draft is the accepted one
    second: Tensor  # [B]


def rrs(p: Tensor, q: Tensor) -> Accepted:
    """p, q [B, V] in float64: two drafts with replacement (SpecHub, arXiv 2411.05289, section 2)."""
    first = torch.minimum(p, q).sum(-1)
    rest = (p - q).clamp(min=0)
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
    return Accepted(first, (1 - first) * torch.minimum(rest, q).sum(-1))


def rrsw(p: Tensor, q: Tensor) -> Accepted:
    """Without replacement: the second draft, from q without the rejected first x, is tested against norm((p - q)+).

    sum_y min(rest(y), c q(y)) with c = 1 / (1 - q(x)) for all x at once, by prefix sums over y in the order of
    rest / q; rest(x) = 0 wherever x can be rejected, so y = x adds nothing.
    """
    first = torch.minimum(p, q).sum(-1)
    rest, rejected = (p - q).clamp(min=0), (q - p).clamp(min=0)
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
    share, order = torch.where(rest > 0, rest / q, 0.0).sort(dim=-1)
    below = torch.nn.functional.pad(rest.gather(1, order).cumsum(-1), (1, 0))
    above = q.sum(-1, keepdim=True) - torch.nn.functional.pad(q.gather(1, order).cumsum(-1), (1, 0))
    c = 1 / (1 - q).clamp(min=1e-300)
    at = torch.searchsorted(share, c, right=True)
    accepted = below.gather(1, at) + c * above.gather(1, at).clamp(min=0)
    return Accepted(first, (rejected * accepted.clamp(max=1)).sum(-1))


def spechub(p: Tensor, q: Tensor) -> Accepted:
    """Pairs (x, a) and (a, x) with the hub a = argmax q, tested as in the paper's algorithm 1."""
    a = q.argmax(-1, keepdim=True)
    hub = torch.zeros_like(q).scatter(1, a, 1.0) > 0
    p_a, q_a = p.gather(1, a)[:, 0], q.gather(1, a)
    p_x, q_x = p.masked_fill(hub, 0.0), q.masked_fill(hub, 0.0)
    joint = q_a * without_argmax(q)  # Q(a, x)
    p1 = (p_x - q_x).clamp(min=0)
    x_first, x_second = torch.minimum(p_x, q_x).sum(-1), torch.minimum(p1, joint).sum(-1)
    a_first = torch.minimum(p_a, (joint - p1).clamp(min=0).sum(-1))
    a_second = torch.minimum(p_a - a_first, (q_x - p_x).clamp(min=0).sum(-1))
    return Accepted(x_first + a_first, x_second + a_second)


RULES = {"RRS": rrs, "RRSw": rrsw, "SpecHub": spechub}


@torch.inference_mode()
def nodes_of_pair(_: Path, *, temperature: float, prompts_: int, tokens: int, every: int) -> Any:
    """First- and second-draft acceptance of every rule at the same places of the target's own text: per prompt."""
    texts = held_out_texts(prompts_)
    given, logits, target, draft = prefilled(texts)
    requests = torch.arange(len(given))
    target, draft = target.of(requests), draft.of(requests)
    position = torch.tensor([len(one) for one in given])
    heat = torch.full((len(given),), temperature)
    found: dict[str, list[list[float]]] = {f"{rule} {which}": [] for rule in RULES for which in Accepted._fields}
    p = softmax_at(logits, heat)
    for step in range(tokens):
        token = CounterRNG(requests + 1, position, purpose=1).sample(p)
        q = softmax_at(models().draft.logits(read_one(models().draft, draft, token, position, requests)), heat)
        p = softmax_at(models().target.logits(read_one(models().target, target, token, position, requests)), heat)
        if step % every == 0:
            for rule, accepted in RULES.items():
                for which, value in accepted(p.double(), q.double())._asdict().items():
                    found[f"{rule} {which}"].append(value.tolist())
        position = position + 1
    return {name: torch.tensor(values).mean(0).tolist() for name, values in found.items()} | {"file": files(prompts_)}


def toy_table(_: Path, *, pairs: int) -> Any:
    """SpecHub, appendix D: V = 50, normal logits u_p and u_q, p = softmax(u_p / T), q = softmax of a mix / T."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for temperature in (0.1, 0.25, 0.5):
        for share in (0.7, 0.5):
            own, other = torch.randn(2, pairs, 50, generator=generator, dtype=torch.float64)
            p, q = (own / temperature).softmax(-1), ((share * own + (1 - share) * other) / temperature).softmax(-1)
            values = {rule: sum(accepted(p, q)).tolist() for rule, accepted in RULES.items()}
            for name, kind in (("OTM", "iid"), ("OTMw", "without_replacement")):
                values[name] = [optimal_acceptance(*one, 2, kind) for one in zip(p, q, strict=True)]  # type: ignore[arg-type]
            means = {name: sum(value) / pairs for name, value in values.items()}
            found.append({"T": temperature, "lambda": share, **means})
    return found
