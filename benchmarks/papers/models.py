"""A pair in plain PyTorch, what it has read of the held-out prompts, and what the target says behind them."""

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import tokens_per_step
from benchmarks.papers.llama import Cache, Llama
from benchmarks.tokens_per_step import PAIR

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Subject(NamedTuple):
    """A pair with one vocabulary, and texts for it; without texts, those of the bundled pair."""

    target: Path = PAIR / "target"
    draft: Path = PAIR / "draft"
    prompts: tuple[str, ...] = ()  # that neither was trained on
    learnt_from: tuple[str, ...] = ()  # other ones, for what methods learn


_subject = Subject()


def use(subject: Subject) -> None:
    """Measure `subject` from now on, in this process."""
    global _subject
    _subject = subject
    for remembered in (models, prefilled, greedy_text, held_out_texts):
        remembered.cache_clear()


def subject() -> Subject:
    return _subject


class Models:
    def __init__(self) -> None:
        self.target, self.draft = Llama(_subject.target), Llama(_subject.draft)
        self.tokenizer = AutoTokenizer.from_pretrained(_subject.target)

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
    return _subject.prompts[:count] or tuple(tokens_per_step.prompts(count))


def files(count: int) -> list[int]:
    """Index of the text that each of the held-out prompts is from."""
    return list(range(len(_subject.prompts[:count]))) or tokens_per_step.files(count)


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
