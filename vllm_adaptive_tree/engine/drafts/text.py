"""Drafts without a checkpoint: n-grams, suffix trees, and the text drafters of third parties."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.drafts.base import DraftKind


class Text(DraftKind):
    """Any `TextDrafter`."""

    title = "no checkpoint"
    method = "ngram"  # V2 keeps tokens on the device for it
    built_as = "ngram_gpu"  # asynchronous scheduling stays on
    proposer = "vllm_adaptive_tree.engine.v1.text_drafter:HostTextDrafter"
    replaces = "create_custom_proposer"
    speculator = "vllm_adaptive_tree.engine.v2.text_speculator:TextSpeculator"

    @contextmanager
    def built_from(self, draft: Checkpoint, keys: Mapping[str, Any]) -> Iterator[str]:
        yield self.method

    def restore(self, config: Any, model: str) -> None:
        config.speculative_config.model = model
        config.speculative_config.method = self.method if config.use_v2_model_runner else "custom_class"

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        """Do nothing: there is no checkpoint."""
