"""Top-k and sums over the vocabulary in one pass: chunks of 64 tokens first, then the tokens of a few chunks."""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64
SORT_LIMIT = 1 << 14
"""Most entries for which `torch.topk` is faster than going through chunks."""


def joint_topk(rows: Tensor, offset: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Select the top k over all W rows of rows [..., W, V] + offset [..., W] together, in descending order.

    The k largest entries lie in the k chunks with the largest maxima, so only those are sorted.

    Returns:
        value, row and token, [..., min(k, W * V)] each.
    """
    width, vocabulary = rows.shape[-2:]
    if width * vocabulary <= SORT_LIMIT:
        value, index = (rows + offset[..., None]).flatten(-2).topk(min(k, width * vocabulary))
        return value, index // vocabulary, index % vocabulary
    maxima = chunk_maxima(rows)
    chunks = maxima.shape[-1]
    best = maxima.add_(offset[..., None]).flatten(-2).topk(min(k, width * chunks)).indices  # [..., C]
    row = best // chunks
    spare = chunks * CHUNK - vocabulary  # entries missing from the last chunk of a row
    start = best * CHUNK - row * spare if spare else best * CHUNK
    index = start[..., None] + torch.arange(CHUNK, device=rows.device)  # [..., C, 64] in [W * V]
    in_bounds = index.clamp(max=width * vocabulary - 1) if spare else index
    value = rows.flatten(-2).gather(-1, in_bounds.flatten(-2)).view(index.shape)
    value += offset.gather(-1, row)[..., None]
    if spare:
        value.masked_fill_(index >= ((row + 1) * vocabulary)[..., None], -torch.inf)
    value, at = value.flatten(-2).topk(min(k, width * vocabulary))
    index = index.flatten(-2).gather(-1, at)
    return value, index // vocabulary, index % vocabulary


def topk_tokens(rows: Tensor, count: int) -> Tensor:
    """Tokens of the `count` largest entries of rows [..., V], descending, ties to the smaller token: [..., count]."""
    maxima = chunk_maxima(rows)
    count = min(count, rows.shape[-1])
    tokens = torch.full((*rows.shape[:-1], count), -1, device=rows.device)
    for rank in range(count):
        chunk = maxima.argmax(-1, keepdim=True)  # the first of equals
        entries = chunk_entries(rows, chunk, tokens[..., :rank], -torch.inf)
        at = entries.argmax(-1, keepdim=True)
        tokens[..., rank : rank + 1] = chunk * CHUNK + at
        if rank + 1 < count:
            left = entries.scatter(-1, at, -torch.inf).amax(-1, keepdim=True)
            maxima.scatter_(-1, chunk, left.to(maxima.dtype))
    return tokens


def chunk_sums(rows: Tensor) -> Tensor:
    """Sums of chunks: [..., V] -> [..., V / 64] float64."""
    return _chunked(rows, lambda part: part.sum(-1)).double()


def chunk_maxima(rows: Tensor) -> Tensor:
    """Maxima of chunks: [..., V] -> [..., V / 64]."""
    return _chunked(rows, lambda part: part.amax(-1))


def chunk_entries(rows: Tensor, chunk: Tensor, removed: Tensor, fill: float) -> Tensor:
    """Entries (64) of one `chunk` [..., 1] of each row, float64; `fill` for `removed` tokens [..., G] and padding."""
    rim = chunk * CHUNK - 1  # one extra entry at either end absorbs tokens removed from other chunks
    token = rim + torch.arange(CHUNK + 2, device=rows.device)
    entries = rows.gather(-1, token.clamp(0, rows.shape[-1] - 1)).double()
    if removed.shape[-1]:
        entries.scatter_(-1, (removed - rim).clamp_(0, CHUNK + 1), fill)
    if rows.shape[-1] % CHUNK:
        entries.masked_fill_(token >= rows.shape[-1], fill)
    return entries[..., 1:-1]


def _chunked(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    full, rest = divmod(rows.shape[-1], CHUNK)
    if not rest:
        return reduce(rows.unflatten(-1, (full, CHUNK)))
    parts = [reduce(rows[..., :-rest].unflatten(-1, (full, CHUNK))), reduce(rows[..., -rest:])[..., None]]
    return torch.cat(parts, -1)
