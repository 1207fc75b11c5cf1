"""A draft without a checkpoint: it reads the text of each request, and no model runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import DRAFTERS, Rows, Texts
from vllm_adaptive_tree.engine.common.startup import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, Step
from vllm_adaptive_tree.trees import SlicedMask


class HostTextDrafter:
    """What vLLM's method "custom_class" makes here."""

    runner: Any
    hidden_size: int | None = None
    layers: Collection[str] = ()

    def __init__(self, vllm_config: Any):
        options = tree_options(vllm_config)
        assert options.drafter is not None
        vocabulary = vllm_config.model_config.get_vocab_size()
        self.draft = DRAFTERS.load(options.drafter).build(options.lookup, vocabulary=vocabulary)

    def load_model(self, target: Any) -> None:
        """There is none."""

    def begin_cache(self, blocks: int) -> None:
        """It has no K/V."""

    def forget(self, requests: Collection[str]) -> None:
        self.draft.forget(requests)

    def news(self, step: Step, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return [CatchUp(row, start, [], root) for row, start, _, root in step.spans()]

    def due(self, news: list[CatchUp], room: int, drafting: bool) -> list[CatchUp]:
        return news if drafting else []

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """As `V1Drafter.catch_up`."""
        roots = {item.row: item.root for item in items if item.root is not None}
        if not roots:
            return Rows(torch.empty(0)), None
        batch, rows, length = self.runner.input_batch, list(roots), [1 + root for root in roots.values()]
        tokens = torch.from_numpy(batch.token_ids_cpu[rows, : max(length)]).long()
        prompt = torch.from_numpy(batch.num_prompt_tokens[rows]).long()
        return self.draft.begin(Texts([batch.req_ids[row] for row in rows], tokens, torch.tensor(length), prompt))

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return self.draft.grow(tokens, parent, state)

    def sample_state(self) -> Any:
        name = "_"
        length = torch.tensor([8])
        _, state = self.draft.begin(Texts([name], torch.zeros(1, 8, dtype=torch.int64), length, length))
        self.draft.forget([name])
        return state
