"""What is asked of long rows [..., V], at the cost of one pass over them: chunks of 64 first, then tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64
SHORT = 1 << 14
"""Entries that one sort takes faster than chunks do."""


def largest(rows: Tensor, offset: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of rows [..., W, V] + offset [..., W], in falling order.

    They lie in the k chunks of 64 tokens whose maxima are largest, so only those are sorted.

    Returns:
        value, row and token, [..., min(k, W * V)] each.
    """
    width, vocabulary = rows.shape[-2:]
    if width * vocabulary <= SHORT:
        value, place = (rows + offset[..., None]).flatten(-2).topk(min(k, width * vocabulary))
        return value, place // vocabulary, place % vocabulary
    maxima = _chunked(rows, lambda part: part.amax(-1))
    chunks = maxima.shape[-1]
    best = maxima.add_(offset[..., None]).flatten(-2).topk(min(k, width * chunks)).indices  # [..., C]
    row = best // chunks
    spare = chunks * CHUNK - vocabulary  # places that the last chunk of a row lacks
    start = best * CHUNK - row * spare if spare else best * CHUNK
    place = start[..., None] + torch.arange(CHUNK, device=rows.device)  # [..., C, 64] in [W * V]
    inside_row = place.clamp(max=width * vocabulary - 1) if spare else place
    value = rows.flatten(-2).gather(-1, inside_row.flatten(-2)).view(place.shape)
    value += offset.gather(-1, row)[..., None]
    if spare:
        value.masked_fill_(place >= ((row + 1) * vocabulary)[..., None], -torch.inf)
    value, at = value.flatten(-2).topk(min(k, width * vocabulary))
    place = place.flatten(-2).gather(-1, at)
    return value, place // vocabulary, place % vocabulary


def best_tokens(rows: Tensor, count: int) -> Tensor:
    """The `count` largest tokens of rows [..., V] in falling order, ties to the smaller token: [..., count]."""
    maxima = _chunked(rows, lambda part: part.amax(-1))
    count = min(count, rows.shape[-1])
    tokens = torch.full((*rows.shape[:-1], count), -1, device=rows.device)
    for rank in range(count):
        chunk = maxima.argmax(-1, keepdim=True)  # the first of equals
        entries = inside(rows, chunk, tokens[..., :rank], -torch.inf)
        at = entries.argmax(-1, keepdim=True)
        tokens[..., rank : rank + 1] = chunk * CHUNK + at
        if rank + 1 < count:
            left = entries.scatter(-1, at, -torch.inf).amax(-1, keepdim=True)
            maxima.scatter_(-1, chunk, left.to(maxima.dtype))
    return tokens


def chunk_sums(rows: Tensor) -> Tensor:
    """[..., V] -> [..., V / 64] float64."""
    return _chunked(rows, lambda part: part.sum(-1)).double()


def inside(rows: Tensor, chunk: Tensor, gone: Tensor, fill: float) -> Tensor:
    """Entries of one `chunk` [..., 1] of each row; `fill` for the tokens `gone` [..., G] and behind the end: [..., 64]
    float64."""
    rim = chunk * CHUNK - 1  # one place more at either end takes the tokens gone from other chunks
    token = rim + torch.arange(CHUNK + 2, device=rows.device)
    entries = rows.gather(-1, token.clamp(0, rows.shape[-1] - 1)).double()
    if gone.shape[-1]:
        entries.scatter_(-1, (gone - rim).clamp_(0, CHUNK + 1), fill)
    if rows.shape[-1] % CHUNK:
        entries.masked_fill_(token >= rows.shape[-1], fill)
    return entries[..., 1:-1]


def _chunked(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    full, rest = divmod(rows.shape[-1], CHUNK)
    if not rest:
        return reduce(rows.unflatten(-1, (full, CHUNK)))
    parts = [reduce(rows[..., :-rest].unflatten(-1, (full, CHUNK))), reduce(rows[..., -rest:])[..., None]]
    return torch.cat(parts, -1)
