"""A draft that knows the continuations of texts, and has at every depth a wrong branch that often seems better."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch

from vllm_adaptive_tree import register
from vllm_adaptive_tree.drafters import Continuations, DraftOptions, Lookup, Texts
from vllm_adaptive_tree.options import option

DEPTH, ASTRAY = 6, 3
"""Tokens of the right branch, and of a wrong one after it diverges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOptions(DraftOptions):
    texts: str = option("", lambda value: isinstance(value, str), "a file")


class Known(Lookup):
    """Draft whose accepted paths pass through any child, so the commit has to find their K/V there."""

    Options: ClassVar[type[DraftOptions]] = KnownOptions
    length = DEPTH + ASTRAY

    def __init__(self, vocabulary: int, texts: list[list[int]]):
        super().__init__(vocabulary)
        self.texts = texts

    @classmethod
    def build(cls, options: KnownOptions, *, vocabulary: int) -> Self:
        return cls(vocabulary, json.loads(Path(options.texts).read_text()) if options.texts else [])

    def continuations(self, texts: Texts) -> Continuations:
        found = torch.full((len(texts.length), DEPTH + 1, DEPTH + ASTRAY), -1)
        weight = torch.zeros(found.shape[:2])
        for row, length in enumerate(texts.length.tolist()):
            text = texts.tokens[row, :length].tolist()
            known = next((one for one in self.texts if one[:length] == text), text)
            right = known[length : length + DEPTH]
            share = 1.0
            for depth, token in reversed([*enumerate(right)]):
                astray = [(token + 1 + 7 * i + length) % self.vocabulary for i in range(1 + ASTRAY)]
                branch = [*right[:depth], *[one for one in astray if one != token][:ASTRAY]]
                found[row, depth, : len(branch)] = torch.tensor(branch)
                weight[row, depth] = share * (1.5 if (length + depth) % 2 else 0.4)
                share += float(weight[row, depth])
            if right:
                found[row, DEPTH, : len(right)] = torch.tensor(right)
                weight[row, DEPTH] = 1.0
            weight[row] /= share
        return Continuations(found, weight)


def known(texts: list[list[int]], folder: Path, nodes: int, *, chains: bool = False) -> dict[str, object]:
    """A speculative_config with this draft; `chains`: for a target whose trees are chains."""
    register("known", "tests.engine.known:Known")
    file = folder / "texts.json"
    file.write_text(json.dumps(texts))
    options: dict[str, object] = {"budget": None, "texts": str(file)}
    if not chains:
        options |= {"threshold": 0, "draft_temperature": 1.0}
    method = "adaptive_tree" if chains else "opt_tree"
    return {"method": method, "model": "known", "num_speculative_tokens": nodes, "tree": options}
