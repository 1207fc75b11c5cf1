"""The draft `new_method`: the end of the text once more."""

from dataclasses import dataclass
from typing import Self

import torch

from vllm_adaptive_tree.drafters import Continuations, DraftOptions, Lookup, Texts
from vllm_adaptive_tree.options import count


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMethodOptions(DraftOptions):
    """What users may write into `tree` for this draft, beside the options of the method."""

    period: int = count(4)


class NewMethod(Lookup):
    """The last `period` tokens once more: one continuation, so its tree is a chain."""

    Options = NewMethodOptions

    def __init__(self, vocabulary: int, period: int):
        super().__init__(vocabulary)
        self.period = period

    @classmethod
    def build(cls, options: NewMethodOptions, *, vocabulary: int) -> Self:
        return cls(vocabulary, options.period)

    def continuations(self, texts: Texts) -> Continuations:
        place = texts.length[:, None] + torch.arange(-self.period, 0, device=texts.tokens.device)
        tokens = texts.tokens.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1)
        return Continuations(tokens[:, None], torch.ones(len(tokens), 1, device=tokens.device))
