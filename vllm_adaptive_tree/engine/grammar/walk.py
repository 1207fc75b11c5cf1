"""Grammars on trees: draft tokens that bring their parents to the scheduler, and a walk of a grammar along branches."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

WORD = 32
"""Tokens per word of a mask."""
ANY = -1
"""Word that allows all of its tokens."""
COPIES = {"matcher": "fork", "ll_matcher": "deep_copy"}
"""Attribute that holds the state in the grammars of xgrammar and guidance -> its method that copies it."""


class TreeTokens(list[int]):
    """Draft tokens of one request in generation order, with their parents. To vLLM's scheduler they are a list of
    tokens, of which it keeps a prefix."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]):
        """`parents`: of each token, the index of an earlier one in `tokens`; -1 for children of the root."""
        super().__init__(tokens)
        self.parents = tuple(parents)

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "TreeTokens":
        """`tokens` as they are if they have parents, else as a chain."""
        return tokens if isinstance(tokens, cls) else cls(tokens, range(-1, len(tokens) - 1))

    def __getitem__(self, at: Any) -> Any:
        item = super().__getitem__(at)
        return TreeTokens(item, self.parents[at]) if isinstance(at, slice) else item

    def extend(self, padding: Iterable[int]) -> None:
        super().extend(padding)
        self.parents += (-1,) * (len(self) - len(self.parents))

    def __delitem__(self, at: Any) -> None:
        super().__delitem__(at)
        self.parents = self.parents[: len(self)]

    def __reduce__(self) -> tuple[type[Self], tuple[list[int], tuple[int, ...]]]:
        return type(self), (list(self), self.parents)


class Bounds(NamedTuple):
    """Bounds of a path under its grammar: the indices of the first token that the grammar reads, and of the first that
    it constrains. An unconstrained path has bounds beyond its end; both are 0 for a request that does not reason."""

    reads: int
    constrains: int


class Walker:
    """Reads tokens along branches with a copy of the grammar where its backend has copies, else itself."""

    def __init__(
        self, grammar: Any, words: int, *, request: str = "", rolls_back: bool = True, furthest: int | None = None
    ):
        """The arguments are those of `GrammarWalk`."""
        self.grammar, self.words, self.request, self.furthest = grammar, words, request, furthest
        self.copied = copying(grammar)
        self.rolls_back = rolls_back or self.copied is None
        self.walking = grammar
        """Grammar, or its copy, that has read the tokens `read`."""
        self.read: list[int] = []
        self.before: Tensor | None = None
        """Mask of a grammar without copies before it has read anything."""

    def after(self, tokens: Sequence[int]) -> Any:
        """Grammar after it has read `tokens`, valid until the next call; None if it rejects one or has ended before."""
        if self.furthest is not None and len(tokens) > self.furthest:
            return None
        pairs = zip(self.read, tokens, strict=False)
        common = next((at for at, (here, there) in enumerate(pairs) if here != there), min(len(self.read), len(tokens)))
        self._back(common)
        return self.walking if all(self._reads(token) for token in tokens[common:]) else None

    def close(self, *, checked: bool = False) -> None:
        """Return to where the grammar itself was before. Raises RuntimeError if it is not there; with `checked` also if
        a copy cannot be rolled back."""
        moved = self.walking is not self.grammar
        if self.copied is None or (checked and moved):
            self._back(0)
            before = self.before if self.copied is None else self._mask(self.grammar)
            if before is not None and not before.equal(self._mask(self.walking)):
                raise RuntimeError("rolled back, it allows other tokens than before")
        self.walking, self.read, self.before = self.grammar, [], None

    def _reads(self, token: int) -> bool:
        if self.walking is self.grammar:
            if self.copied is not None:
                self.walking = self.copied(self.grammar)
            elif self.before is None:
                self.before = self._mask(self.grammar)
        if self.walking.validate_tokens([token]) and self.walking.accept_tokens(self.request, [token]):
            self.read.append(token)
            return True
        if not self.rolls_back:
            self.walking, self.read = self.grammar, []
        return False

    def _back(self, length: int) -> None:
        if len(self.read) <= length:
            return
        if self.rolls_back:
            self.walking.rollback(len(self.read) - length)
            del self.read[length:]
            return
        kept, self.walking, self.read = self.read[:length], self.grammar, []
        for token in kept:
            self._reads(token)

    def _mask(self, grammar: Any) -> Tensor:
        """Tokens that `grammar` allows; none after its end."""
        mask = torch.zeros(1, self.words, dtype=torch.int32)
        if not grammar.is_terminated():
            grammar.fill_bitmask(mask, 0)
        return mask


class GrammarWalk:
    """Grammar of one request along the branches of a tree. A fault of its backend ends the walk, not the request: all
    tokens are then allowed, and `failed` is called."""

    def __init__(
        self,
        grammar: Any,
        bounds: Callable[[Sequence[int]], Bounds],
        words: int,
        *,
        request: str = "",
        rolls_back: bool = True,
        furthest: int | None = None,
        no_ends: Sequence[int] = (),
        failed: Callable[[Exception], Any] | None = None,
    ):
        """
        Args:
            grammar: vLLM's StructuredOutputGrammar; it has read what is committed.
            bounds: of a path.
            words: of a mask; 32 tokens each.
            request: its name, for vLLM's log.
            rolls_back: True if a copy's rollback is right; if not, a new copy reads each branch.
            furthest: most tokens that it can be rolled back; None: any number.
            no_ends: tokens that would end the reasoning, and that the grammar rejects in its first place.
            failed: called once, after a fault, when `grammar` may be in another state, unless it has copies; returns
                the grammar to go on with. None: raise.
        """
        self.grammar, self.bounds, self.words = grammar, bounds, words
        self.walker = Walker(grammar, words, request=request, rolls_back=rolls_back, furthest=furthest)
        self.no_ends, self.failed = no_ends, failed
        self.ended = False
        """True after a fault."""

    def fill(self, path: Sequence[int], mask: Tensor, row: int = 0) -> bool:
        """Write the tokens that may follow `path` into `mask[row]` ([words] int32).

        Returns:
            True if the mask constrains. All tokens may follow while the request reasons (but for `no_ends`), after the
            end of the grammar, after a path that the grammar rejects (never walked), and after a fault.
        """
        constrained: bool | None = self._guarded(self._fill, path, mask, row)
        if constrained is None:
            mask[row].fill_(ANY)
        return constrained or False

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """Number of `tokens` that may follow `path`, one after the other; after a fault all."""
        count: int | None = self._guarded(self._allowed, path, tokens)
        return len(tokens) if count is None else count

    def close(self) -> None:
        """End the walk: the grammar is as it was before."""
        self._guarded(self.walker.close)

    def fill_tree(self, tokens: Sequence[int], mask: Tensor) -> bool:
        """Write the tokens that may follow the root and each node of the tree of `tokens` to `mask` [1 + nodes, words],
        and end the walk. Tokens below 0 are no nodes; what follows them is free.

        Returns:
            True if the nodes may be accepted; False after a fault, where only the root's mask is the grammar's.
        """
        self._guarded(self._fill_tree, TreeTokens.of(tokens), mask)
        if self.ended:
            mask.fill_(ANY)
            reasons = self.bounds([]).constrains > 0
            self._write(None if reasons else self.grammar, reasons, mask, 0)
        return not self.ended

    def _guarded(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `step`; None at a fault, and after one."""
        if self.ended:
            return None
        try:
            return step(*arguments)
        except Exception as error:
            self.ended = True
            if self.failed is None:
                raise
            self.grammar = self.failed(error)
            return None

    def _fill(self, path: Sequence[int], mask: Tensor, row: int) -> bool:
        start, constrains = self.bounds(path)
        reasons = len(path) < constrains
        return self._write(None if reasons else self.walker.after(path[start:]), reasons, mask, row)

    def _write(self, grammar: Any, reasons: bool, mask: Tensor, row: int) -> bool:
        """`grammar`: None where it does not constrain."""
        if grammar is not None and not grammar.is_terminated():
            grammar.fill_bitmask(mask, row)
            return True
        mask[row].fill_(ANY)
        for token in self.no_ends if reasons else ():
            mask[row].numpy().view(np.uint32)[token // WORD] &= ~np.uint32(1 << token % WORD)
        return reasons and len(self.no_ends) > 0

    def _allowed(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        for count in range(len(tokens)):
            longer = [*path, *tokens[: count + 1]]
            start, _ = self.bounds(longer)
            if start < len(longer) and self.walker.after(longer[start:]) is None:
                return count
        return len(tokens)

    def _fill_tree(self, tree: TreeTokens, mask: Tensor) -> None:
        constrained = self.bounds([]) == (0, 0) and min(tree, default=-1) >= 0 and not self.grammar.is_terminated()
        if constrained and hasattr(getattr(self.grammar, "matcher", None), "traverse_draft_tree"):  # xgrammar
            _traverse(self.grammar.matcher.fork(), tree, mask)
            return
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree, tree.parents, strict=True):
            paths.append([*paths[1 + parent], token])
        for row in sorted(range(len(paths)), key=paths.__getitem__):  # branch by branch
            if min(paths[row], default=0) < 0:
                mask[row].fill_(ANY)
            else:
                self._fill(paths[row], mask, row)
        self.walker.close(checked=True)


def copying(grammar: Any) -> Callable[[Any], Any] | None:
    """Function that copies vLLM's StructuredOutputGrammar with a state of its own; None if the backend cannot."""
    for part, method in COPIES.items():
        if hasattr(getattr(grammar, part, None), method):
            return partial(_copied, part=part, method=method)
    return None


def _copied(grammar: Any, *, part: str, method: str) -> Any:
    copied = copy(grammar)
    setattr(copied, part, getattr(getattr(grammar, part), method)())
    return copied


def _traverse(matcher: Any, tree: TreeTokens, mask: Tensor) -> None:
    """Fill `mask` by xgrammar's own walk: one call for all nodes."""
    child, sibling = ([-1] * (1 + len(tree)) for _ in range(2))
    for row in range(len(tree), 0, -1):
        parent = 1 + tree.parents[row - 1]
        child[parent], sibling[row] = row, child[parent]
    mask.zero_()  # the walk does not reach nodes below a path that ends the grammar or is rejected
    matcher.traverse_draft_tree(torch.tensor(child), torch.tensor(sibling), torch.tensor([0, *tree]), mask)
    mask[(mask == 0).all(1)] = ANY
