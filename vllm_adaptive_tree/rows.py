"""What is asked of long rows [..., V], at the cost of one pass over them: chunks of 64 first, then tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64
SHORT = 1 << 13
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
    chunks = -(-vocabulary // CHUNK)
    maxima = _chunked(rows, lambda part: part.amax(-1))
    best = (maxima + offset[..., None]).flatten(-2).topk(min(k, width * chunks)).indices  # [..., C]
    row, chunk = best // chunks, best % chunks
    token = chunk[..., None] * CHUNK + torch.arange(CHUNK, device=rows.device)  # [..., C, 64]
    beyond = token >= vocabulary
    place = row[..., None] * vocabulary + token.clamp(max=vocabulary - 1)
    value = rows.flatten(-2).gather(-1, place.flatten(-2)).unflatten(-1, token.shape[-2:])
    value = (value + offset.gather(-1, row)[..., None]).masked_fill(beyond, -torch.inf).flatten(-2)
    value, at = value.topk(min(k, width * vocabulary))
    return value, row.gather(-1, at // CHUNK), token.flatten(-2).gather(-1, at)


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
    full = rows.shape[-1] // CHUNK
    parts = [reduce(rows[..., : full * CHUNK].unflatten(-1, (full, CHUNK)))]
    if rows.shape[-1] > full * CHUNK:
        parts.append(reduce(rows[..., full * CHUNK :])[..., None])
    return torch.cat(parts, -1)
