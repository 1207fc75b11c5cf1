"""Heads that predict all levels in one forward: it runs when a step drafts, and no model runs for a level."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.drafters.one_forward import OneForward
from vllm_adaptive_tree.engine.common.block_lattice import Marginals
from vllm_adaptive_tree.engine.common.startup import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, Step


class OneForwardDrafter:
    """Comes before one of vLLM's proposers among the bases of a class, which reads the target's states."""

    runner: Any
    hidden_size: int | None
    lattice: OneForward | Marginals
    """What the rows of a level are, given what the forward has left."""

    def begin_drafting(self, vllm_config: Any) -> None:
        self.levels, self.vocabulary = tree_options(vllm_config).levels or 1, vllm_config.model_config.get_vocab_size()

    def forget(self, requests: Collection[str]) -> None:
        """No request has a state of its own."""

    def news(self, step: Step, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return step.new_states(accepted)

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return self.lattice.grow(tokens, parent, state)
