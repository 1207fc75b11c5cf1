"""Suffix decoding (arXiv 2411.04975): continuations of earlier occurrences of the text's end, in it and in past
answers.

The suffix trees are those of `arctic-inference`, as in vLLM's own method, which reads its drafts as chains; here they
are trees.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_adaptive_tree.drafters.base import Texts
from vllm_adaptive_tree.drafters.lookup import Continuations, Lookup
from vllm_adaptive_tree.options import MOST, Options, count, fraction, is_int, number, option
from vllm_adaptive_tree.version import pip_install

NODES = 64
"""Most nodes of each request that the suffix trees are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions(Options):
    """Options as in vLLM."""

    suffix_decoding_max_tree_depth: int = count(default=24)
    """Most tokens of a match and its continuation together."""
    suffix_decoding_max_cached_requests: int = option(
        10000, lambda value: is_int(value) and 0 <= value <= MOST, "a whole number from 0 to 2**31 - 1"
    )
    """Past requests whose answers are kept."""
    suffix_decoding_max_spec_factor: float = number(1.0, 0.01, 100)
    """Tokens that are drafted after a match, in lengths of the match."""
    suffix_decoding_min_token_prob: float = fraction(default=0.1)
    """Least probability, by counts, of a token that is drafted."""


class Suffix(Lookup):
    """Suffix trees on the host: on a device each step waits for its tokens.

    A tree is read as chains, one for each node: its weight is that of the text that ends there.
    """

    Options: ClassVar[type[Options]] = SuffixOptions
    requires = ("arctic_inference", f"{pip_install('suffix')}, or use 'ngram'")

    def __init__(self, vocabulary: int, options: SuffixOptions):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        super().__init__(vocabulary)
        self.options, self.length = options, options.suffix_decoding_max_tree_depth
        self.cache = SuffixDecodingCache(
            max_tree_depth=options.suffix_decoding_max_tree_depth,
            max_cached_requests=options.suffix_decoding_max_cached_requests,
        )
        self.seen: dict[str, int] = {}
        """Number of tokens of each request that are in the cache."""

    @classmethod
    def build(cls, options: SuffixOptions, *, vocabulary: int) -> Self:
        return cls(vocabulary, options)

    def continuations(self, texts: Texts) -> Continuations:
        tokens, length = texts.tokens.int().cpu().numpy(), texts.length.tolist()
        rows = zip(texts.requests, tokens, length, texts.prompt.tolist(), strict=True)
        chains = [_chains(self._speculate(name, text[:end], prompt)) for name, text, end, prompt in rows]
        most = max((len(chain) for chain in chains), default=0) or 1
        longest = max((len(tokens) for chain in chains for tokens, _ in chain), default=1)
        padded = [
            [tokens + [-1] * (longest - len(tokens)) for tokens, _ in chain] + [[-1] * longest] * (most - len(chain))
            for chain in chains
        ]
        weight = [[weight for _, weight in chain] + [0.0] * (most - len(chain)) for chain in chains]
        device = texts.tokens.device
        return Continuations(torch.tensor(padded, device=device), torch.tensor(weight, device=device))

    def forget(self, requests: Collection[str]) -> None:
        """Drop requests that have ended; their answers stay, for others."""
        for name in requests:
            if self.seen.pop(name, None) is not None:
                self.cache.stop_request(name)

    def _speculate(self, name: str, text: NDArray[np.int32], prompt: int) -> Any:
        if name not in self.seen:
            self.cache.start_request(name, text[:prompt])
            self.seen[name] = prompt
        self.cache.add_active_response(name, text[self.seen[name] :])
        self.seen[name] = len(text)
        return self.cache.speculate(
            name,
            text[-self.options.suffix_decoding_max_tree_depth :],
            max_spec_tokens=NODES,
            max_spec_factor=self.options.suffix_decoding_max_spec_factor,
            min_token_prob=self.options.suffix_decoding_min_token_prob,
            use_tree_spec=True,
        )


def _chains(draft: Any) -> list[tuple[list[int], float]]:
    """Chains from the root to each node at which texts end, with their share of all texts."""
    weight, paths = list(draft.probs), list[list[int]]()
    for token, parent, prob in zip(draft.token_ids, draft.parents, draft.probs, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
        if parent >= 0:
            weight[parent] -= prob
    least = 1e-6  # counts are divided in float32
    chains = zip(paths, weight, strict=True)
    return [(path, value) for path, value in chains if value > least]
