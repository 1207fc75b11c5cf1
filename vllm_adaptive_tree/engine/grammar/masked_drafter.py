"""A draft that follows grammars: tokens that they reject are not drafted, and have q = 0 where a rule reads q."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Continuations, Drafter, Rows
from vllm_adaptive_tree.engine.grammar.walk import GrammarWalk
from vllm_adaptive_tree.trees.tree_batch import EMPTY

Branch = tuple[GrammarWalk, Sequence[int]]
"""Grammar of a request, and the tokens emitted since the last one that the grammar has read, up to the new root."""


class MaskedDrafter:
    """Drafter of R trees, some of which grow under a grammar."""

    def __init__(self, drafter: Drafter, grammars: Mapping[int, Branch]):
        """`grammars`: by request."""
        self.drafter, self.grammars = drafter, grammars
        self.paths = {request: [list(emitted)] for request, (_, emitted) in grammars.items()}
        """Path of each slot: the tokens from where the grammar is."""

    def roots(self, rows: Rows) -> Rows:
        """The rows of the roots [R, 1, V], masked in place."""
        return self._masked(rows, [(request, 0, paths[0]) for request, paths in self.paths.items()])

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        rows, state = self.drafter.grow(tokens, parent, state)
        read = []
        for request, paths in self.paths.items():
            for column, (token, above) in enumerate(
                zip(tokens[request].tolist(), parent[request].tolist(), strict=True)
            ):
                paths.append([*paths[above], token])
                if token >= 0:
                    read.append((request, column, paths[-1]))
        return self._masked(rows, read), state

    def _masked(self, rows: Rows, nodes: list[tuple[int, int, list[int]]]) -> Rows:
        """Mask rows. `nodes`: request, column, and path of each."""
        if not nodes:
            return rows
        mask = torch.empty(len(nodes), self.grammars[nodes[0][0]][0].words, dtype=torch.int32)
        said = [False] * len(nodes)
        for row in sorted(range(len(nodes)), key=lambda row: (nodes[row][0], nodes[row][2])):  # branch by branch
            request, _, path = nodes[row]
            said[row] = self.grammars[request][0].fill(path, mask, row)
        if not any(said):
            return rows
        of, column, _ = zip(*(node for node, under in zip(nodes, said, strict=True) if under), strict=True)
        allowed = unpacked(mask[said], rows.logits.shape[-1])
        logits = rows.logits[of, column]
        known = logits.amax(-1) > -torch.inf
        logits.masked_fill_(~allowed, -torch.inf)
        rows.logits[of, column] = logits
        nothing = known & (logits.amax(-1) == -torch.inf)  # the grammar rejects all that the draft predicts
        if not nothing.any():
            return rows
        dead = torch.zeros(rows.logits.shape[:2], dtype=torch.bool) if rows.dead is None else rows.dead.clone()
        dead[torch.tensor(of)[nothing], torch.tensor(column)[nothing]] = True
        return rows._replace(dead=dead)


def unpacked(mask: Tensor, vocabulary: int) -> Tensor:
    """Tokens that `mask` [M, words] allows: [M, V] bool."""
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def masked_continuations(continuations: Continuations, grammars: Mapping[int, Branch]) -> Continuations:
    """Continuations of R requests, each cut where a grammar rejects it."""
    if not grammars:
        return continuations
    tokens = continuations.tokens.clone()
    for request, (walk, emitted) in grammars.items():
        for chain in tokens[request]:
            proposed = [token for token in chain.tolist() if token >= 0]
            chain[walk.allowed(emitted, proposed) :] = EMPTY
    return continuations._replace(tokens=tokens)
