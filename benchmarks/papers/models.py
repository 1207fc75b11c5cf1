"""The bundled pair in plain PyTorch, what it has read of the held-out prompts, and what the target says behind them."""

import os
from functools import lru_cache

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.papers.llama import Cache, Llama
from benchmarks.tokens_per_step import PAIR, prompts

os.environ.setdefault("HF_HUB_OFFLINE", "1")


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
def prefilled(texts: tuple[str, ...]) -> tuple[list[list[int]], Tensor, Cache, Cache]:
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
def greedy_text(texts: tuple[str, ...], tokens: int) -> Tensor:
    """Greedy text of the target after each prompt: [R, tokens]."""
    given, logits, cache, _ = prefilled(texts)
    position = torch.tensor([len(one) for one in given])
    cache = cache.of(torch.arange(len(given)))
    said = [logits.argmax(-1)]
    for _ in range(tokens - 1):
        hidden = read_one(models().target, cache, said[-1], position, torch.arange(len(given)))
        said.append(models().target.logits(hidden).argmax(-1))
        position = position + 1
    return torch.stack(said, 1)


@lru_cache
def held_out_texts(count: int) -> tuple[str, ...]:
    return tuple(prompts(count))


def read_one(model: Llama, cache: Cache, token: Tensor, position: Tensor, requests: Tensor) -> Tensor:
    """Hidden states [R, H] of one more token each, behind all places before its own."""
    visible = torch.arange(int(position.max()) + 1) <= position[:, None, None]
    position = position[:, None]
    return model.read(cache, token[:, None], position, position, visible, requests)[:, 0]


def log_likelihood(texts: tuple[str, ...], first: Tensor, said: list[list[int]]) -> list[float]:
    """The target's log probability of what was `said` behind each prompt and its `first` token, at temperature 1."""
    given = [[*one, start] for one, start in zip(models().encode(list(texts)), first.tolist(), strict=True)]
    longest = max(len(one) + len(more) for one, more in zip(given, said, strict=True))
    whole = [[*one, *more] for one, more in zip(given, said, strict=True)]
    padded = torch.tensor([[*one, *[-1] * (longest - len(one))] for one in whole])
    positions = torch.arange(longest).expand_as(padded)
    visible = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(whole), -1, -1)
    target = models().target
    hidden = target.read(target.empty(len(whole)), padded, positions, positions, visible, None)
    found = []
    for row, (one, more) in enumerate(zip(given, said, strict=True)):
        log_p = target.logits(hidden[row, len(one) - 1 : len(one) - 1 + len(more)]).log_softmax(-1)
        found.append(round(float(log_p.gather(1, torch.tensor(more)[:, None]).sum()), 4))
    return found
