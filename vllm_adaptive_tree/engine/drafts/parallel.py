"""Heads that predict all levels in one forward; of them P-EAGLE, an EAGLE-3 head with rows of mask tokens.

vLLM takes `num_speculative_tokens` for the number of tokens that such a head predicts, and builds query rows and slots
by it. Here it is the node budget, and the checkpoint says how many tokens the head predicts.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.drafts.base import named_like
from vllm_adaptive_tree.engine.drafts.causes import LAYERS, LENGTH, MASK, NORM, PRECISION, TARGET, VOCABULARY
from vllm_adaptive_tree.engine.drafts.eagle import AuxiliaryHead, Eagle3

PARALLEL = ("num_depths", "pard_token", "ptd_token_id")
"""Keys of a config.json that mark a P-EAGLE head among EAGLE-3 heads, which have the same class in vLLM."""
CLASSES = {
    "PEagleDraftModel": "Eagle3LlamaForCausalLM",
    "PeagleLlamaForCausalLM": "Eagle3LlamaForCausalLM",
    "PeagleQwen3ForCausalLM": "Eagle3Qwen3ForCausalLM",
}
"""Names of P-EAGLE heads -> vLLM's class of them, under a name that its configuration of EAGLE-3 heads keeps."""


class OneForward(AuxiliaryHead, ABC):
    node_states = False

    @abstractmethod
    def levels(self, draft: Checkpoint) -> int:
        """Levels of a tree that the checkpoint predicts.

        Raises:
            ValueError: it does not give the number, or its tensors contradict it.
        """

    def check_mask(self, draft: Checkpoint, vocabulary: int) -> None:
        mask = draft.mask_token
        if not isinstance(mask, int) or not 0 <= mask < vocabulary:
            raise draft.refused(
                f"names no token for the positions that it predicts (mask_token_id {mask!r} in its config.json, of "
                f"{vocabulary} tokens); set mask_token_id to the one that it was trained with"
            )


class PEagle(OneForward):
    title = "a P-EAGLE head"
    method = "eagle3"
    proposer = "vllm_adaptive_tree.engine.v1.parallel_drafter:ParallelDrafter"
    speculator = None
    speculators = "peagle"
    architecture = "(?i)peagle"
    tensors = (r"mask_hidden$",)
    chain_keys: ClassVar[dict[str, Any]] = {"parallel_drafting": True}
    causes = LAYERS, MASK, NORM, VOCABULARY, TARGET, PRECISION, LENGTH

    def in_config(self, config: Mapping[str, Any]) -> str | None:
        sign = super().in_config(config)
        key = next((key for key in PARALLEL if config.get(key) is not None), None)
        if sign is not None or key is None or config.get("speculators_model_type") is not None:
            return sign
        as_eagle3 = named_like(Eagle3.architecture, config)
        return None if as_eagle3 is None else f"{as_eagle3} with {key}"

    def check_config(self, draft: Checkpoint, config: Any, vocabulary: int) -> None:
        config.architectures = _known(config.architectures)
        super().check_config(draft, config, vocabulary)
        self.check_mask(draft, vocabulary)

    def levels(self, draft: Checkpoint) -> int:
        """Depths that it was trained for; vLLM predicts as many as the user asks for."""
        methods = (draft.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        depths = draft.config.get("num_depths", methods[0].get("speculative_tokens"))
        if not isinstance(depths, int) or depths < 2:
            raise draft.refused(
                f"does not say how many tokens it predicts at once (num_depths {depths!r} in its config.json); set "
                "num_depths to the one that it was trained with, at least 2"
            )
        return depths

    def rewritten(self, draft: Checkpoint) -> dict[str, Any] | None:
        """Config of an EAGLE-3 head, which has the same class."""
        if "speculators_model_type" in draft.config:
            return None
        return draft.config | {"architectures": _known(draft.config.get("architectures"))}


def as_vllm_drafts(config: Any, method: str, levels: int) -> Any:
    """A VllmConfig for vLLM's own class of such heads. `method`: vLLM's."""
    copied = copy.copy(config)
    spec = copied.speculative_config = copy.copy(config.speculative_config)
    spec.method, spec.parallel_drafting, spec.num_speculative_tokens = method, True, levels
    return copied


def _known(architectures: list[str] | None) -> list[str]:
    return [CLASSES.get(name, name) for name in architectures or ()]
