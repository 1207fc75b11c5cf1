"""Grammars on trees: draft tokens that bring their parents to the scheduler, and a grammar that walks on branches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

WORD = 32
"""Tokens of a word of a mask."""
ANY = -1
"""A word that allows all of them."""


class TreeTokens(list[int]):
    """The draft tokens of one request in generation order, and their parents. vLLM's scheduler takes them for a list of
    tokens, of which it keeps a prefix."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]):
        """`parents`: of each token, an index into `tokens` before its own, -1 for children of the root."""
        super().__init__(tokens)
        self.parents = tuple(parents)

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "TreeTokens":
        """Themselves, or a chain."""
        return tokens if isinstance(tokens, cls) else cls(tokens, range(-1, len(tokens) - 1))

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return TreeTokens(found, self.parents[at]) if isinstance(at, slice) else found

    def extend(self, padding: Iterable[int]) -> None:
        super().extend(padding)
        self.parents += (-1,) * (len(self) - len(self.parents))

    def __delitem__(self, at: Any) -> None:
        super().__delitem__(at)
        self.parents = self.parents[: len(self)]

    def __reduce__(self) -> tuple[type[Self], tuple[list[int], tuple[int, ...]]]:
        return type(self), (list(self), self.parents)


class Bounds(NamedTuple):
    """Where a path comes under its grammar: the indices of the first token that the grammar reads, and of the first
    that it has a say in. Beyond the end of a path that is unconstrained; both 0 for a request that does not reason."""

    reads: int
    constrains: int


class GrammarWalk:
    """The grammar of one request, moved along the branches of a tree, and `close`d where it stood before."""

    def __init__(
        self,
        grammar: Any,
        bounds: Callable[[Sequence[int]], Bounds],
        words: int,
        *,
        request: str = "",
        furthest: int | None = None,
        no_ends: Sequence[int] = (),
    ):
        """
        Args:
            grammar: vLLM's StructuredOutputGrammar; it has read what is committed.
            bounds: of a path.
            words: of a mask; 32 tokens each.
            request: its name, for vLLM's log.
            furthest: how many tokens it can be rolled back; None: any number.
            no_ends: tokens that would end the reasoning, and that the grammar rejects in its first place.
        """
        self.grammar, self.bounds, self.words = grammar, bounds, words
        self.request, self.furthest, self.no_ends = request, furthest, no_ends
        self.read: list[int] = []
        """The tokens that `grammar` has read since."""

    def fill(self, path: Sequence[int], mask: Tensor, row: int = 0) -> bool:
        """Write which tokens may follow `path` into `mask[row]` ([words] int32).

        Returns:
            Whether not all may. All may while the request reasons, but for `no_ends`, after the end of the grammar,
            and after a path that the grammar rejects, which nobody walks.
        """
        start, constrains = self.bounds(path)
        if len(path) >= constrains and self._move(path[start:]) and not self.grammar.is_terminated():
            self.grammar.fill_bitmask(mask, row)
            return True
        mask[row].fill_(ANY)
        reasons = len(path) < constrains
        for token in self.no_ends if reasons else ():
            mask[row].numpy().view(np.uint32)[token // WORD] &= ~np.uint32(1 << token % WORD)
        return reasons and len(self.no_ends) > 0

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow `path`, one after the other."""
        for count in range(len(tokens)):
            longer = [*path, *tokens[: count + 1]]
            start, _ = self.bounds(longer)
            if start < len(longer) and not self._move(longer[start:]):
                return count
        return len(tokens)

    def _move(self, tokens: Sequence[int]) -> bool:
        """Let the grammar stand after `tokens`; false if it rejects one or has ended before."""
        if self.furthest is not None and len(tokens) > self.furthest:
            return False
        pairs = zip(self.read, tokens, strict=False)
        common = next((at for at, (here, there) in enumerate(pairs) if here != there), min(len(self.read), len(tokens)))
        self._back(common)
        for token in tokens[common:]:
            if not self.grammar.validate_tokens([token]) or not self.grammar.accept_tokens(self.request, [token]):
                return False
            self.read.append(token)
        return True

    def _back(self, length: int) -> None:
        if len(self.read) > length:
            self.grammar.rollback(len(self.read) - length)
            del self.read[length:]

    def close(self) -> None:
        self._back(0)

    def fill_tree(self, tokens: Sequence[int], mask: Tensor) -> None:
        """Write which tokens may follow the root, and each node of the tree of `tokens`, to `mask` [1 + nodes, words].

        Tokens below 0 are no nodes; what follows them is free.
        """
        tree = TreeTokens.of(tokens)
        constrained = self.bounds([]) == (0, 0) and min(tree, default=0) >= 0 and not self.grammar.is_terminated()
        if constrained and (matcher := getattr(self.grammar, "matcher", None)) is not None:  # xgrammar
            _traverse(matcher, tree, mask)
            return
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree, tree.parents, strict=True):
            paths.append([*paths[1 + parent], token])
        for row in sorted(range(len(paths)), key=paths.__getitem__):  # branch by branch
            if min(paths[row], default=0) < 0:
                mask[row].fill_(ANY)
            else:
                self.fill(paths[row], mask, row)
        self.close()


def _traverse(matcher: Any, tree: TreeTokens, mask: Tensor) -> None:
    """xgrammar's own walk: one call for all nodes."""
    child, sibling = ([-1] * (1 + len(tree)) for _ in range(2))
    for row in range(len(tree), 0, -1):
        parent = 1 + tree.parents[row - 1]
        child[parent], sibling[row] = row, child[parent]
    mask.zero_()  # it does not come to what is below a path that ends the grammar, or is rejected
    matcher.traverse_draft_tree(torch.tensor(child), torch.tensor(sibling), torch.tensor([0, *tree]), mask)
    mask[(mask == 0).all(1)] = ANY
