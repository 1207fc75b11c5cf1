"""What is asked of long rows [..., V], at the cost of one pass over them: chunks of 64 first, then tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64


def largest(rows: Tensor, offset: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of rows [..., W, V] + offset [..., W], in falling order.

    They lie in the k chunks of 64 tokens whose maxima are largest, so only those are sorted.

    Returns:
        value, row and token, [..., min(k, W * V)] each.
    """
    width, vocabulary = rows.shape[-2:]
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
    tokens: list[Tensor] = []
    for _ in range(min(count, rows.shape[-1])):
        chunk = maxima.argmax(-1)  # the first of equals
        best = inside(rows, chunk, tokens, -torch.inf).argmax(-1)
        tokens.append(chunk * CHUNK + best)
        left = inside(rows, chunk, tokens, -torch.inf).amax(-1)
        maxima = maxima.scatter(-1, chunk[..., None], left[..., None].to(maxima.dtype))
    return torch.stack(tokens, -1) if tokens else rows.new_empty(*rows.shape[:-1], 0, dtype=torch.int64)


def chunk_sums(rows: Tensor) -> Tensor:
    """[..., V] -> [..., V / 64] float64."""
    return _chunked(rows, lambda part: part.sum(-1)).double()


def inside(rows: Tensor, chunk: Tensor, gone: list[Tensor], fill: float) -> Tensor:
    """Entries of one `chunk` [...] of each row; `fill` for the tokens `gone` [...] and behind the end: [..., 64]."""
    token = chunk[..., None] * CHUNK + torch.arange(CHUNK, device=rows.device)
    entries = rows.gather(-1, token.clamp(max=rows.shape[-1] - 1)).double()
    hidden = token >= rows.shape[-1]
    for other in gone:
        hidden = hidden | (token == other[..., None])
    return entries.masked_fill(hidden, fill)


def _chunked(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    full = rows.shape[-1] // CHUNK
    parts = [reduce(rows[..., : full * CHUNK].unflatten(-1, (full, CHUNK)))]
    if rows.shape[-1] > full * CHUNK:
        parts.append(reduce(rows[..., full * CHUNK :])[..., None])
    return torch.cat(parts, -1)
