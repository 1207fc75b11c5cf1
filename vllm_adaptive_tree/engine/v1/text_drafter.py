"""Draft without a checkpoint: it reads the text of each request, and no model runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Rows, Texts
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView
from vllm_adaptive_tree.trees import SlicedMask


class HostTextDrafter:
    """Proposer that vLLM's method "custom_class" creates here."""

    runner: Any
    hidden_size: int | None = None
    layers: Collection[str] = ()

    def __init__(self, vllm_config: Any):
        options = tree_options(vllm_config)
        assert options.text is not None
        self.draft = options.text.build(vllm_config.model_config.get_vocab_size(), compiled=True)

    def load_model(self, target: Any) -> None:
        """Do nothing: there is no model."""

    def begin_cache(self, blocks: int) -> None:
        """Do nothing: there is no K/V."""

    def forget(self, requests: Collection[str]) -> None:
        self.draft.forget(requests)

    def pending(self, step: StepView, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return [CatchUp(row, start, [], root) for row, start, _, root in step.spans()]

    def to_read(
        self, pending: list[CatchUp], room: int, drafting: bool, states: Sequence[Tensor] | None
    ) -> list[CatchUp]:
        return pending if drafting else []

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """See `V1Drafter.catch_up`."""
        roots = {item.row: item.root for item in items if item.root is not None}
        if not roots:
            return Rows(torch.empty(0)), None
        return self.draft.begin(token_history(self.runner.input_batch, roots))

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return self.draft.grow(tokens, parent, state)

    def sample_state(self) -> Any:
        name = "_"
        length = torch.tensor([8])
        _, state = self.draft.begin(Texts([name], torch.zeros(1, 8, dtype=torch.int64), length, length))
        self.draft.forget([name])
        return state


def token_history(batch: Any, roots: Mapping[int, int]) -> Texts:
    """Texts of the requests with a root in vLLM's InputBatch; `roots`: their row -> its position."""
    rows, length = list(roots), [1 + root for root in roots.values()]
    tokens = torch.from_numpy(batch.token_ids_cpu[rows, : max(length)]).long()
    prompt = torch.from_numpy(batch.num_prompt_tokens[rows]).long()
    return Texts([batch.req_ids[row] for row in rows], tokens, torch.tensor(length), prompt)
