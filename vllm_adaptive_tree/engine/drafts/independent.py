"""Independent draft model: a whole model of the target's vocabulary."""

from collections.abc import Mapping
from typing import Any

from vllm_adaptive_tree.engine.checkpoint import Checkpoint, Shape
from vllm_adaptive_tree.engine.drafts.base import DraftKind
from vllm_adaptive_tree.engine.drafts.causes import ADAPTERS, PRECISION, TOKENIZER

EMBEDDINGS = ("emb", "wte")
"""Substrings of the names of token embeddings, in every family of models."""


class Independent(DraftKind):
    title = "an independent model"
    method = "draft_model"
    proposer = "vllm_adaptive_tree.engine.v1.model_drafter:ModelDrafter"
    replaces = "DraftModelProposer"
    speculator = "vllm_adaptive_tree.engine.v2.speculator:ModelSpeculator"
    judged_by_path = independent = node_states = True
    causes = TOKENIZER, PRECISION, ADAPTERS

    def in_tensors(self, tensors: Mapping[str, Shape | None]) -> str | None:
        embeds = any(part in name for name in tensors for part in EMBEDDINGS)
        return "a token embedding, and no tensor of a head" if embeds else None

    def slots_ahead(self, draft: Checkpoint) -> int:
        """The new root's. Nodes never enter the cache."""
        return 1

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        super().finalize(config, draft)
        model = config.speculative_config.draft_model_config
        if model.use_mla:
            raise draft.refused(
                "has multi-head latent attention, whose backends of vLLM part a batch by lengths that the host does "
                "not know of a draft model: take one with other attention, or a head"
            )
        if model.uses_mrope:
            raise draft.refused(
                "has M-RoPE, whose positions are several numbers, and a draft's are one: take a model of text alone "
                "with the target's tokenizer, or a head"
            )
        if model.is_hybrid:
            raise draft.refused(
                "keeps a recurrent state, which follows one sequence, and a draft reads all nodes of a level at once: "
                "take a draft of attention alone"
            )
