"""Prompt look-up: continuations of earlier occurrences of a text's last tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from vllm_adaptive_tree.drafters.base import Texts
from vllm_adaptive_tree.drafters.lookup import Continuations, Lookup
from vllm_adaptive_tree.options import Options, count

MATCHES = 8
"""Most occurrences kept for each request: the longest, of these the latest."""
LENGTH = 16
"""Tokens of a continuation."""
LONGER = 2.0
"""Weight of an occurrence relative to one that is a token shorter."""
NOTHING = 4.0
"""Weight of no repetition, relative to an occurrence of one token. Fitted to chats of a small model, with `LONGER`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramOptions(Options):
    prompt_lookup_min: int = count(default=1)
    """Fewest tokens that an occurrence has in common with the end of the text; as in vLLM."""
    prompt_lookup_max: int = count(default=4)
    """Most tokens that are compared."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config['tree']['prompt_lookup_min'] must be at most 'prompt_lookup_max', got "
                f"{self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )


class NGram(Lookup):
    """Prompt look-up decoding (Saxena, 2023) as a tree: all occurrences at once, merged by their common prefixes."""

    Options: ClassVar[type[Options]] = NGramOptions
    length = LENGTH
    compiled = "vllm_adaptive_tree.drafters.ngram_cpu:NGramCPU"
    fused = "vllm_adaptive_tree.kernels.ngram:FusedNGram"
    chain_keys: ClassVar[dict[str, Any]] = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}  # as ours

    def __init__(self, vocabulary: int, shortest: int, longest: int):
        super().__init__(vocabulary)
        self.shortest, self.longest = shortest, longest

    @classmethod
    def build(cls, options: NGramOptions, *, vocabulary: int) -> Self:
        return cls(vocabulary, options.prompt_lookup_min, options.prompt_lookup_max)

    def continuations(self, texts: Texts) -> Continuations:
        tokens, length = texts.tokens, texts.length
        requests, longest = tokens.shape
        place = torch.arange(longest, device=tokens.device)
        following = place < length[:, None]  # [R, L]: a continuation begins here
        common = torch.zeros_like(tokens)  # tokens before each place that are those at the end of the text
        same = following
        for back in range(1, min(self.longest, longest - 1) + 1):
            last = tokens.gather(1, (length - back).clamp(min=0)[:, None])
            same = same & (place >= back) & (tokens.roll(back, 1) == last)
            common += same
        score = common * longest + place  # longer ones first, then later ones
        score = score.masked_fill(common < self.shortest, -1)
        best, start = score.topk(min(MATCHES, longest), 1)
        length_of = torch.where(best >= 0, common.gather(1, start), 0)
        longest_match = length_of.amax(1, keepdim=True).clamp(min=1)  # powers of differences: no match is too long
        weight = torch.where(best >= 0, LONGER ** (length_of - longest_match).float(), 0.0)
        weight = weight / (weight.sum(1, keepdim=True) + NOTHING * LONGER ** (1 - longest_match).float())
        at = start[:, :, None] + torch.arange(LENGTH, device=tokens.device)
        inside = (at < length[:, None, None]) & (best >= 0)[:, :, None]
        found = tokens.gather(1, at.clamp(max=longest - 1).flatten(1)).view(requests, -1, LENGTH)
        return Continuations(found.masked_fill(~inside, -1), weight)
