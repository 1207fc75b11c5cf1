"""Heads that read the target's hidden states and draft token by token: EAGLE, EAGLE-3 and MTP layers."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from vllm_adaptive_tree.config import supported_drafts_hint
from vllm_adaptive_tree.engine.checkpoint import Checkpoint, Shape
from vllm_adaptive_tree.engine.drafts.base import DraftKind, extend_context
from vllm_adaptive_tree.engine.drafts.causes import ADAPTERS, LAYERS, LENGTH, NORM, PRECISION, TARGET, VOCABULARY
from vllm_adaptive_tree.engine.targets import auxiliary

REFUSED_MTP = {
    "gemma4_mtp": "Gemma 4's assistant, which shares the target's K/V",
    "step3p5_mtp": "Step 3.5's MTP modules, which vLLM drafts with in a way of its own",
}


class Head(DraftKind):
    proposer = "vllm_adaptive_tree.engine.v1.head_drafter:HeadDrafter"
    speculator: ClassVar[str | None] = "vllm_adaptive_tree.engine.v2.head_speculator:HeadSpeculator"
    node_states = True

    def slots_ahead(self, draft: Checkpoint) -> int:
        return 1

    def check_config(self, draft: Checkpoint, config: Any, vocabulary: int) -> None:
        """Refuse a head for a family of targets for which vLLM has no class."""
        from vllm.model_executor.models import ModelRegistry
        from vllm.transformers_utils.configs.eagle import EAGLEConfig
        from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

        if not isinstance(config, EAGLEConfig | SpeculatorsConfig):
            config = EAGLEConfig(config, method=self.method, model_type="eagle")
        if not set(config.architectures) & ModelRegistry.get_supported_archs():
            raise draft.refused(
                f"is {self.title} of architecture {config.architectures[0]!r}, which this vLLM does not have; correct "
                "'architectures' in its config.json, or use another draft"
            )

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        super().finalize(config, draft)
        size, model = config.model_config.get_hidden_size(), config.speculative_config.draft_model_config
        given = getattr(model.hf_config, "target_hidden_size", None) if self.combines_states else None
        key, width = ("target_hidden_size", given) if given else ("hidden_size", model.get_hidden_size())
        if width != size:
            raise draft.refused(
                f"reads hidden states of {width} ({key}), and the target's have {size}; use a head trained for this "
                "target"
            )
        states, what = self.joined(config, draft)
        for name in ("fc.weight", "mask_hidden"):
            shape = (draft.tensors or {}).get(name)
            if states and shape is not None and shape[-1] != states * size:
                raise draft.refused(
                    f"joins inputs of {shape[-1]} ({name}), and {what} of this target have {states * size}; use a head "
                    "trained for this target"
                )

        extend_context(config)

    def joined(self, config: Any, draft: Checkpoint) -> tuple[int, str]:
        """Number of states that its input joins, and their name; 0: it has none to check."""
        return 2, "a token's embedding and one hidden state"


class Eagle(Head):
    title = "an EAGLE head"
    method = "eagle"
    model_type = "eagle"
    architecture = "^Eagle[A-Z]"  # Eagle2_5_VL is a model
    causes = TARGET, PRECISION, LENGTH, ADAPTERS

    def in_tensors(self, tensors: Mapping[str, Shape | None]) -> str | None:
        """An input that joins the embedding of a token with one state of the target."""
        return in_fc(tensors)


class MTP(Head):
    title = "an MTP module"
    method = "mtp"
    model_type = ".*_mtp"
    architecture = "^(?!Eagle[A-Z]).*MTP"
    told_by_tensors = False  # their names have nothing in common, and the target's tensors are with them
    judged_by_path = True
    target_keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    part_of_target = "the target's own MTP layers"
    causes = PRECISION, ADAPTERS, LENGTH

    def check_config(self, draft: Checkpoint, config: Any, vocabulary: int) -> None:
        from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

        overridden = SpeculativeConfig.hf_config_override(copy.deepcopy(config))
        modules = getattr(overridden, "n_predict", 0)
        if modules is None and overridden.model_type == "qwen3_next_mtp":
            # Its config.json gives no number, and vLLM takes one.
            modules = int(draft.tensors is None or any("mtp." in name for name in draft.tensors))
        if overridden.model_type in REFUSED_MTP:
            raise draft.refused(f"is {REFUSED_MTP[overridden.model_type]}, not served yet; {supported_drafts_hint()}")
        if overridden.model_type not in get_args(MTPModelTypes) or not modules:
            raise draft.refused(
                f"(model_type {config.model_type!r}) has no MTP module that this vLLM knows; remove 'draft' from "
                "'tree', and give a draft as 'model'"
            )
        if modules > 1:
            raise draft.refused(
                f"has {modules} MTP modules, one for each depth, not served yet; {supported_drafts_hint()}"
            )

    def joined(self, config: Any, draft: Checkpoint) -> tuple[int, str]:
        return 0, ""


class AuxiliaryHead(Head):
    """Head that reads states of the target's layers."""

    combines_states = True
    needed_layers: ClassVar[str | None] = None  # key for them, where vLLM has no default

    def joined(self, config: Any, draft: Checkpoint) -> tuple[int, str]:
        """Check the states of the target's layers, and write them to vLLM's configuration."""
        target, head = config.model_config, config.speculative_config.draft_model_config.hf_config
        self.check_vocabulary(draft, getattr(head, "draft_vocab_size", None), target.get_vocab_size())
        states = self._states(draft, target)
        auxiliary.finalize_head_config(head, draft, states)
        return len(states), f"the auxiliary states of {len(states)} layers {list(states)}"

    def check_vocabulary(self, draft: Checkpoint, given: int | None, vocabulary: int) -> None:
        """Refuse another vocabulary than the target's `vocabulary`, or `given` tokens of it that are not named."""
        reduced = given or vocabulary
        if reduced > vocabulary:
            raise draft.refused(
                f"drafts from {reduced} tokens (draft_vocab_size), and the target has {vocabulary}; use a head trained "
                "for this target"
            )
        if draft.tensors is None:
            return
        if reduced < vocabulary and "d2t" not in draft.tensors:
            raise draft.refused(
                f"drafts from {reduced} of {vocabulary} tokens (draft_vocab_size), and has no tensor 'd2t' that says "
                "which; use a complete checkpoint"
            )
        if reduced == vocabulary and "d2t" in draft.tensors:
            raise draft.refused(
                f"drafts from all {vocabulary} tokens (draft_vocab_size), and has a tensor 'd2t', which vLLM then "
                "cannot load; remove 'd2t' from the file, or correct draft_vocab_size in its config.json"
            )

    def _states(self, draft: Checkpoint, target: Any) -> tuple[int, ...]:
        """Number of the target's layers below each state; none for a head that reads the last one."""
        from vllm.model_executor.models.interfaces import supports_eagle3

        if not auxiliary.switches_of(draft).get("use_aux_hidden_state", True):
            return ()
        cls, _ = target.registry.resolve_model_cls(target.architectures, target)
        if not supports_eagle3(cls):
            raise draft.refused(
                f"is {self.title}, and the target ({cls.__name__}) gives no auxiliary hidden states in this vLLM; use "
                "an EAGLE head, an independent model, or 'ngram'"
            )
        return auxiliary.check_states(draft, target.get_total_num_hidden_layers(), self.needed_layers)


class Eagle3(AuxiliaryHead):
    title = "an EAGLE-3 head"
    method = "eagle3"
    speculators: ClassVar[str | None] = "eagle3"
    architecture = "(?i)eagle3"
    keys: ClassVar[tuple[str, ...]] = ("draft_vocab_size", auxiliary.IDS, auxiliary.SECTION)
    tensors = (r"midlayer\.|layers\.\d+\.hidden_norm\.", r"d2t$|t2d$")
    causes = LAYERS, NORM, VOCABULARY, TARGET, PRECISION, LENGTH

    def in_tensors(self, tensors: Mapping[str, Shape | None]) -> str | None:
        """An input that joins three states of the target, or a name."""
        shape = tensors.get("fc.weight")
        wide = shape is not None and len(shape) == 2 and shape[1] > 2 * shape[0]
        return super().in_tensors(tensors) or (in_fc(tensors) if wide else None)


def in_fc(tensors: Mapping[str, Shape | None]) -> str | None:
    """Sign of an input that joins several states."""
    if "fc.weight" not in tensors:
        return None
    shape = tensors["fc.weight"]
    return f"tensor 'fc.weight' of shape {'unknown' if shape is None else list(shape)}"
