"""Distributions of a tree's nodes, from the hidden states of a DFlash-like head's block; for both model runners."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_adaptive_tree.drafters import ByDepth, ByPair, ByParent, ByPath, Rows
from vllm_adaptive_tree.drafters.one_forward import Lattice, OneForward


class Marginals:
    """DFlash: the logits of each depth."""

    def __init__(self, model: Any, vocabulary: int):
        """`model`: vLLM's, with its weights; `vocabulary`: V of the target."""
        self.model, self.vocabulary = model, vocabulary
        self.nodes: OneForward = ByDepth()

    def begin(self, hidden: Tensor, roots: Tensor) -> tuple[Rows, Lattice]:
        """The roots' rows and the state of R trees. `hidden` [R, K, H] of the rows that predict depths 1 to K, after
        that of the root where the kind needs the whole block; `roots` [R]: tokens."""
        return self.nodes.begin(self.logits(hidden), roots=roots)

    def grow(self, tokens: Tensor, parent: Tensor, state: Lattice) -> tuple[Rows, Lattice]:
        return self.nodes.grow(tokens, parent, state)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, K, V]"""
        logits: Tensor = self.model.compute_logits(hidden.flatten(0, 1))
        return logits.unflatten(0, hidden.shape[:2])


class Markov(Marginals):
    """DSpark: with a bias by the parent's token."""

    def __init__(self, model: Any, vocabulary: int, most: int | None):
        """`most`: tokens that the head predicts at each depth; None: all."""
        super().__init__(model, vocabulary)
        self.nodes, self.most = ByParent(self.bias, vocabulary), most

    def begin(self, hidden: Tensor, roots: Tensor) -> tuple[Rows, Lattice]:
        if self.most is None:
            return super().begin(hidden, roots)
        best = self.logits(hidden).topk(self.most)
        return self.nodes.begin(best.values, best.indices, roots)

    def bias(self, tokens: Tensor) -> Tensor:
        """Bias that is added to the logits [R, W, V] of the children of `tokens` [R, W]."""
        bias: Tensor = self.model.markov_bias(self.model.markov_embed(tokens.flatten()))
        moved: Tensor | None = self.model.draft_id_to_target_id
        if moved is not None:
            places = torch.arange(len(moved), device=moved.device) + moved
            bias = bias.new_zeros(len(bias), self.vocabulary).index_copy_(1, places, bias)
        return bias.unflatten(0, tokens.shape)


class Refined(Marginals):
    """XPress: with a bias by all tokens before, as the passes of its refiner converge to it."""

    def __init__(self, model: Any, vocabulary: int, most: int):
        """`most`: tokens that the head predicts at each depth; 0: all."""
        super().__init__(model, vocabulary)
        self.head, self.most = model.model.xpress_head, most
        mixer = self.head.mix_L.permute(1, 2, 0).float()  # of bfloat16 in vLLM's passes, which sum in float32
        self.nodes: ByPath = ByPath(self.put, mixer, self.bias, vocabulary)

    def begin(self, hidden: Tensor, roots: Tensor) -> tuple[Rows, Lattice]:
        logits, places = self.logits(hidden[:, 1:].contiguous()), self.head.hidden_cache(hidden)
        if not self.most:
            return self.nodes.begin(logits, None, roots, places)
        best = logits.topk(min(self.most, self.vocabulary))
        return self.nodes.begin(best.values, best.indices, roots, places)

    def put(self, tokens: Tensor, places: Tensor) -> Tensor:
        """What `tokens` [R, W] and the states of their places put in there, [R, W, D]."""
        put: Tensor = self.head.in_proj(torch.cat([places, self.head.w1(tokens)], -1))
        return put

    def bias(self, mixed: Tensor) -> Tensor:
        """Bias [R, W, V] of places with these mixtures [R, W, D]."""
        head, mixed = self.head, mixed.to(self.head.w2.weight.dtype)
        bias: Tensor = head.w2(mixed + head.mlp_down(silu(head.mlp_gate(mixed)) * head.mlp_up(mixed)))
        return bias


Scores = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Candidates [R, K, C], their logits [R, K, C], hidden states [R, K, H] and roots [R] -> scores of pairs
[R, K, C before, C], of a candidate of one depth and one of the next."""


class Pairs(Marginals):
    """DFlash2 and LiLiCorr: scores of pairs of candidates."""

    def __init__(self, model: Any, vocabulary: int, scores: Scores):
        super().__init__(model, vocabulary)
        self.nodes, self.scores = ByPair(vocabulary), scores

    def begin(self, hidden: Tensor, roots: Tensor) -> tuple[Rows, Lattice]:
        scored = self.model.compute_candidates(hidden.flatten(0, 1))
        candidates, logits = (part.unflatten(0, hidden.shape[:2]) for part in scored)
        return self.nodes.begin(self.scores(candidates, logits, hidden, roots).float(), candidates)
