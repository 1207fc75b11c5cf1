"""Drafts that predict all levels in one forward (a lattice); growing a level runs no model.

- `ByDepth`: one distribution for all nodes of a depth. P-EAGLE, DFlash.
- `ByParent`: the depth's distribution, with a bias by the parent's token. DSpark.
- `ByPair`: scores of pairs, a candidate of one depth and one of the next. DFlash2, LiLiCorr.
- `ByPath`: the depth's distribution, with a bias by all tokens from the root on. XPress.

Each may cover the whole vocabulary or C candidates a depth; tokens that are no candidates have probability 0 exactly.
Trees cut from a lattice by best-first search: DDTree (arXiv 2604.12989). That is OPT-Tree here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters.base import Rows


class Lattice(NamedTuple):
    """Result of one forward, and the depth of every slot of R trees."""

    logits: Tensor  # [R, K, C] for depths 1 to K; of pairs: [R, K, C before, C]
    candidates: Tensor | None  # [R, K, C] tokens, distinct at each depth; None: C = V
    depth: Tensor  # [R, S] of every slot so far, the root (0) first
    places: Tensor | None = None  # of paths: [R, 1 + K, H], states of the root's row and of those of depths 1 to K
    mixed: Tensor | None = None  # of paths: [R, S, 1 + K, D], what every slot's path has put into each of them


class OneForward(ABC):
    """The drafter interface over a lattice. Nodes below its last depth have dead rows, which is no fault."""

    def __init__(self, vocabulary: int | None = None):
        """`vocabulary`: V, if there are candidates."""
        self.vocabulary = vocabulary

    def begin(
        self, logits: Tensor, candidates: Tensor | None = None, roots: Tensor | None = None
    ) -> tuple[Rows, Lattice]:
        """Rows of the roots (W = 1), and the state of R trees.

        Args:
            logits, candidates: of the forward, as in `Lattice`. The caller must not change them while a tree grows.
            roots: [R] tokens, if depth 1 too depends on the token before it (`ByParent`).
        """
        depth = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        state = Lattice(logits, candidates, depth)
        return Rows(self._wide(self.root_logits(roots, state), depth, state)), state

    def grow(self, tokens: Tensor, parent: Tensor, state: Lattice) -> tuple[Rows, Lattice]:
        depth = state.depth.gather(1, parent) + 1  # of these nodes; their children are one deeper
        last = state.logits.shape[1]
        at = depth.clamp(max=last - 1)
        logits, unknown = self.child_logits(tokens.clamp(min=0), at, state)
        rows = Rows(self._wide(logits, at, state), dead=(depth >= last) | unknown)
        return rows, state._replace(depth=torch.cat([state.depth, depth], 1))

    def root_logits(self, roots: Tensor | None, state: Lattice) -> Tensor:
        """Logits [R, 1, C] of depth 1, in a tensor of their own."""
        return state.logits[:, :1].clone()

    @abstractmethod
    def child_logits(self, tokens: Tensor, at: Tensor, state: Lattice) -> tuple[Tensor, Tensor | bool]:
        """Logits [R, W, C], in a tensor of their own, of the children at depth `at` + 1 [R, W] of nodes with these
        `tokens` [R, W]; and the nodes [R, W] without a prediction."""

    def _wide(self, logits: Tensor, at: Tensor, state: Lattice) -> Tensor:
        """[R, W, C] -> [R, W, V]"""
        if state.candidates is None:
            return logits
        assert self.vocabulary is not None, "candidates need the size of the vocabulary"
        rows = logits.new_full((*logits.shape[:2], self.vocabulary), -torch.inf)
        return rows.scatter_(2, _of_depth(state.candidates, at), logits)


class ByDepth(OneForward):
    """The same distribution for all nodes of a depth."""

    def child_logits(self, tokens: Tensor, at: Tensor, state: Lattice) -> tuple[Tensor, Tensor | bool]:
        return _of_depth(state.logits, at), False


class ByParent(OneForward):
    """A distribution for each parent token: the depth's logits plus a bias."""

    def __init__(self, bias: Callable[[Tensor], Tensor], vocabulary: int | None = None):
        """`bias`: tokens [R, W] -> [R, W, V]."""
        super().__init__(vocabulary)
        self.bias = bias

    def root_logits(self, roots: Tensor | None, state: Lattice) -> Tensor:
        logits = super().root_logits(roots, state)
        if roots is None:
            return logits
        return logits + self._bias(roots[:, None], torch.zeros_like(roots[:, None]), state)

    def child_logits(self, tokens: Tensor, at: Tensor, state: Lattice) -> tuple[Tensor, Tensor | bool]:
        return _of_depth(state.logits, at) + self._bias(tokens, at, state), False

    def _bias(self, tokens: Tensor, at: Tensor, state: Lattice) -> Tensor:
        bias = self.bias(tokens)
        return bias if state.candidates is None else bias.gather(2, _of_depth(state.candidates, at))


class ByPair(OneForward):
    """A distribution for each parent that is a candidate, from the scores of pairs: vLLM's `CandidateSampler`.

    `logits[:, 0, 0]` is the root's. A node whose token is no candidate of its depth (one that the target or a look-up
    has put there) has a dead row.
    """

    def root_logits(self, roots: Tensor | None, state: Lattice) -> Tensor:
        return state.logits[:, :1, 0].clone()

    def child_logits(self, tokens: Tensor, at: Tensor, state: Lattice) -> tuple[Tensor, Tensor | bool]:
        assert state.candidates is not None
        own = _of_depth(state.candidates, (at - 1).clamp(min=0)) == tokens[..., None]  # [R, W, C]
        request = torch.arange(len(at), device=at.device)[:, None]
        return state.logits[request, at, own.int().argmax(2)], ~own.any(2)


class ByPath(OneForward):
    """A distribution for each path: the depth's logits plus a bias that mixes what the path's tokens have put in.

    A token is put into the place below its own, and a mixer carries it to all places from there on, so a node's mixture
    is its parent's and one more term; that of the place below the node gives the bias of its children. vLLM refines a
    chain in passes over all places; after as many as there are places its tokens stay, those of this law's best path.
    """

    def __init__(
        self,
        put: Callable[[Tensor, Tensor], Tensor],
        mixer: Tensor,
        bias: Callable[[Tensor], Tensor],
        vocabulary: int | None = None,
    ):
        """
        Args:
            put: tokens [R, W] and the states [R, W, H] of places -> what the tokens put in there [R, W, D].
            mixer: [1 + K, 1 + K, D]: factors to each place, the root's first, from each place not after it.
            bias: mixtures [R, W, D] -> [R, W, V].
        """
        super().__init__(vocabulary)
        self.put, self.mixer, self.bias = put, mixer, bias

    def begin(
        self,
        logits: Tensor,
        candidates: Tensor | None = None,
        roots: Tensor | None = None,
        places: Tensor | None = None,
    ) -> tuple[Rows, Lattice]:
        """`places` [R, 1 + K, H]: states of the root's row and of those below. The token before a root counts as the
        root's, as in vLLM, which has no other."""
        assert roots is not None
        assert places is not None
        state = Lattice(logits, candidates, torch.zeros_like(roots[:, None]), places)
        first = torch.arange(2, device=roots.device).expand(len(roots), 2)
        state = state._replace(mixed=self._mixed(roots[:, None].expand(-1, 2), first, state).sum(1, keepdim=True))
        return Rows(self._wide(self.root_logits(roots, state), state.depth, state)), state

    def grow(self, tokens: Tensor, parent: Tensor, state: Lattice) -> tuple[Rows, Lattice]:
        assert state.mixed is not None
        request = torch.arange(len(parent), device=parent.device)[:, None]
        place = (state.depth.gather(1, parent) + 2).clamp(max=state.logits.shape[1])
        mixed = state.mixed[request, parent] + self._mixed(tokens.clamp(min=0), place, state)
        return super().grow(tokens, parent, state._replace(mixed=torch.cat([state.mixed, mixed], 1)))

    def root_logits(self, roots: Tensor | None, state: Lattice) -> Tensor:
        return self.child_logits(state.depth, state.depth, state)[0]

    def child_logits(self, tokens: Tensor, at: Tensor, state: Lattice) -> tuple[Tensor, Tensor | bool]:
        assert state.mixed is not None
        mixed = state.mixed[:, -tokens.shape[1] :]
        below = (at + 1)[:, :, None, None].expand(-1, -1, 1, mixed.shape[3])
        bias = self.bias(mixed.gather(2, below)[:, :, 0])
        bias = bias if state.candidates is None else bias.gather(2, _of_depth(state.candidates, at))
        return _of_depth(state.logits, at) + bias, False

    def _mixed(self, tokens: Tensor, places: Tensor, state: Lattice) -> Tensor:
        """What `tokens` [R, W] in `places` [R, W] add to every place: [R, W, 1 + K, D]."""
        assert state.places is not None
        put = self.put(tokens, _of_depth(state.places, places))
        return put[:, :, None].to(self.mixer.dtype) * self.mixer[:, places].permute(1, 2, 0, 3)


def _of_depth(table: Tensor, at: Tensor) -> Tensor:
    """Rows `at` [R, W] of `table` [R, K, C]: [R, W, C]."""
    return table.gather(1, at[:, :, None].expand(-1, -1, table.shape[2]))
