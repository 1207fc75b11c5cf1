"""What a target makes of the windows of a text, computed once and kept on disk for every later epoch."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = 256  # tokens of a distribution that are kept one by one
SHARE = 0.5  # of the free disk space, at most
LEAST = 1e-6  # probability that a head leaves to the other tokens


class Law(NamedTuple):
    """Target's distributions of the next token, at rows of any shape."""

    best: Tensor  # [..] int32: the target's token
    ids: Tensor  # [.., K] int32: the most probable tokens, of the draft vocabulary if there is one
    probs: Tensor  # [.., K]: the target's probabilities of `ids`
    rest: Tensor  # [..]: its probability of the vocabulary's other tokens, together

    def at(self, rows: Tensor | slice) -> Self:
        """The same at `rows` of the second dimension."""
        return type(self)(*(part[:, rows] for part in self))

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Mean over rows of the cross-entropy of a head's `logits` [.., V or D]; all of `rest` is one event.

        A token outside the draft vocabulary is left out, so a row's weight is the target's probability of the others.
        """
        logits = logits.float()
        log_q = logits.gather(-1, self.ids.long()) - logits.logsumexp(-1, keepdim=True)
        loss = -(self.probs.float() * log_q).sum(-1)
        if self.ids.shape[-1] < logits.shape[-1]:
            others = (1 - log_q.exp().sum(-1)).clamp_min(LEAST)
            loss = loss - self.rest.float() * others.log()
        return loss.mean()


class Observation(NamedTuple):
    """Target's outputs for windows; row t is at token t."""

    law: Law  # [B, T]; of token t + 1
    auxiliary: Tensor  # [B, T, A * H]: the inputs of the layers that the head reads


class Observer:
    """Frozen Llama-like target of transformers.

    Args:
        layers: the target's layers whose inputs the head reads.
        draft_ids: [D] int64, the ids of the head's own vocabulary; None: it is the target's.
    """

    def __init__(self, target: Any, layers: Sequence[int], draft_ids: Tensor | None = None):
        self.target = target.eval().requires_grad_(requires_grad=False)
        self.layers, self.draft_ids = tuple(layers), draft_ids

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Observation:
        """Observation of windows `tokens` [B, T]."""
        out = self.target.model(tokens, use_cache=False, output_hidden_states=True)
        logits = F.linear(out.last_hidden_state, self.target.lm_head.weight).float()
        normaliser, best = logits.logsumexp(-1), logits.argmax(-1)
        if self.draft_ids is not None:
            logits = logits[..., self.draft_ids]
        highest, ids = logits.topk(min(TOP, logits.shape[-1]))
        probs = (highest - normaliser[..., None]).exp()
        rest = (logits.logsumexp(-1) - normaliser).exp() - probs.sum(-1)
        nothing = out.last_hidden_state[..., :0]
        auxiliary = torch.cat([nothing, *(out.hidden_states[layer] for layer in self.layers)], -1)
        return Observation(Law(best.int(), ids.int(), probs, rest.clamp_min(0)), auxiliary)


class Observations:
    """Observations of `windows` [N, T]. Those that were made once are read from `folder`, as far as there is space;
    states and probabilities are kept in bfloat16."""

    def __init__(self, observe: Observer, windows: Tensor, folder: Path | None = None):
        self.observe, self.windows, self.folder = observe, windows, folder
        self.stored: list[Tensor] = []
        self.seen = torch.empty(0, dtype=torch.uint8)  # by window that there is space for

    def __call__(self, at: Tensor) -> tuple[Tensor, Observation]:
        """Windows [B, T] with the numbers `at` [B], and their observation."""
        tokens = self.windows[at]
        fit = at < len(self.seen)
        if bool(fit.all()) and bool(self.seen[at].all()):
            *law, auxiliary = (part[at] for part in self.stored)
            return tokens, Observation(Law(*law), auxiliary)
        made = self.observe(tokens)
        if self.folder is not None:
            parts = [part.bfloat16() if part.is_floating_point() else part for part in (*made.law, made.auxiliary)]
            if not self.stored:
                self._open(self.folder, parts)
                fit = at < len(self.seen)
            for part, new in zip(self.stored, parts, strict=True):
                part[at[fit]] = new[fit]
            self.seen[at[fit]] = 1
        return tokens, made

    def _open(self, folder: Path, like: list[Tensor]) -> None:
        size = sum(part[0].numel() * part.element_size() for part in like)
        there = sum(file.stat().st_size for file in folder.glob("*.observed"))
        count = there // size or min(len(self.windows), int(SHARE * shutil.disk_usage(folder).free) // size)
        names = (*Law._fields, "auxiliary")
        self.stored = [
            _mapped(folder / f"{name}.observed", count, part) for name, part in zip(names, like, strict=True)
        ]
        self.seen = _mapped(folder / "windows.seen", count, torch.empty(1, dtype=torch.uint8))


def _mapped(file: Path, count: int, like: Tensor) -> Tensor:
    """`count` entries of the shape and dtype of `like`'s, in `file`; zeros where it is new."""
    shape = (count, *like.shape[1:])
    if not math.prod(shape):
        return torch.empty(shape, dtype=like.dtype)
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=like.dtype).view(shape)
