"""Heads that predict a block, a mask token for each depth: DFlash, DFlash2, LiLiCorr, DSpark and XPress.

vLLM builds the configuration of each as that of a DFlash head. To its scheduler each is an EAGLE-3 head, which has the
same states and cache, but no slots besides the nodes'.
"""

import logging
from typing import Any, ClassVar

from vllm_adaptive_tree.config import supported_drafts_hint
from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.drafts.base import extend_context
from vllm_adaptive_tree.engine.drafts.causes import LAYERS, LENGTH, MASK, PRECISION, TARGET, VOCABULARY
from vllm_adaptive_tree.engine.drafts.lattice import Marginals, Markov, Pairs, Refined, Scores
from vllm_adaptive_tree.engine.drafts.parallel import OneForward
from vllm_adaptive_tree.engine.targets import auxiliary
from vllm_adaptive_tree.versions import minor

logger = logging.getLogger(f"vllm.{__name__}")

DFLASH = "DFlashDraftModel"
MIXER = "xpress_head.mix.L"


class BlockHead(OneForward):
    method = "dflash"
    built_as: ClassVar[str] = "dflash"
    scheduled_as: ClassVar[str] = "eagle3"  # vLLM's method for its scheduler
    proposer = "vllm_adaptive_tree.engine.v1.block_drafter:BlockDrafter"
    speculator = "vllm_adaptive_tree.engine.v2.block_speculator:BlockSpeculator"
    forward: ClassVar[str]  # import path of vLLM's own speculator on Model Runner V2, which samples nothing
    cls: ClassVar[str]  # vLLM's architecture
    other_cls: ClassVar[dict[str, str]] = {}  # a second name of that class, by `model_type`
    section: ClassVar[tuple[str, ...]] = ()  # keys of its config.json in addition to those of a DFlash head
    optional: ClassVar[tuple[str, ...]] = ()  # further ones that may be null
    anchors: ClassVar[bool] = False  # True if the root's row may predict the token after it, otherwise nothing
    reducible: ClassVar[bool] = True  # False if it drafts from the target's whole vocabulary only
    scorer: ClassVar[str | None] = None  # name of what scores pairs of candidates in vLLM's model
    whole_block: ClassVar[bool] = False  # True if its lattice needs the root's row, which predicts nothing
    needed_layers = "target_layer_ids"
    causes = LAYERS, MASK, TARGET, VOCABULARY, PRECISION, LENGTH

    def check_config(self, draft: Checkpoint, config: Any, vocabulary: int) -> None:
        """Refuse what vLLM does not check, checks too late, or cannot run with trees. In its reading of the config the
        layers are those of the model, also in the format of speculators."""
        merged, said = draft.flat, draft.config.get("architectures") or ["none"]
        layers = {*(merged.get("layer_types") or ()), *(getattr(config, "layer_types", None) or ())}
        known = {self.cls, self.other_cls.get(str(merged.get("model_type")))}
        if "speculators_model_type" not in merged and not known & set(said):
            raise draft.refused(
                f"is {self.title} of architecture {', '.join(map(repr, said))}, not served yet; this release serves "
                f"{self.cls!r}"
            )
        self.check_mask(draft, vocabulary)
        sinks = merged.get("attention_sink_bias") or merged.get("add_swa_attention_sink_bias")
        states, markov = merged.get("use_aux_hidden_state"), merged.get("markov_head_type", "vanilla")
        anchor, reduced = merged.get("sample_from_anchor"), (merged.get("draft_vocab_size") or vocabulary) != vocabulary
        for refused, what in (
            ("sliding_attention" in layers or merged.get("use_swa"), "sliding-window attention"),
            (sinks, "attention sinks"),
            (states is False, "no auxiliary states of the target (use_aux_hidden_state false)"),
            (not self.anchors and anchor, "predictions from the root's row (sample_from_anchor)"),
            (markov != "vanilla", f"a Markov head of type {markov!r}"),
            *((merged.get(key) in (None, 0), f"no {key}") for key in self.section),
            *((key not in merged, f"no {key} (null: the head's own)") for key in self.optional),
            (not self.reducible and reduced, "a reduced vocabulary (draft_vocab_size)"),
        ):
            if refused:
                raise draft.refused(f"is {self.title} with {what}, not served yet; {supported_drafts_hint()}")

    def check_vocabulary(self, draft: Checkpoint, given: int | None, vocabulary: int) -> None:
        super().check_vocabulary(draft, given, vocabulary)
        if (given or vocabulary) < vocabulary and draft.tensors is not None and "lm_head.weight" not in draft.tensors:
            raise draft.refused(
                f"drafts from {given} of {vocabulary} tokens (draft_vocab_size), and has no tensor 'lm_head.weight' of "
                "its own; use a complete checkpoint"
            )

    def levels(self, draft: Checkpoint) -> int:
        size = draft.flat.get("block_size", draft.flat.get("dspark_block_size"))
        if not isinstance(size, int) or size < 1 + (not self.anchors):
            raise draft.refused(
                f"does not say how many tokens it predicts at once (block_size {size!r} in its config.json); set "
                "block_size to the one that it was trained with"
            )
        return size if self.samples_anchor(draft) else size - 1

    def samples_anchor(self, draft: Checkpoint) -> bool:
        """Return whether the root's row predicts the token after it."""
        config = draft.config
        return self.anchors and bool(config.get("sample_from_anchor", "speculators_model_type" not in config))

    def slots_ahead(self, draft: Checkpoint) -> int:
        """The root's and those of the whole block, whose K/V vLLM's class writes on Model Runner V2."""
        return self.levels(draft) + (not self.samples_anchor(draft))

    def rewritten(self, draft: Checkpoint) -> dict[str, Any] | None:
        config = draft.config
        if self.cls == DFLASH or "speculators_model_type" in config:
            return None
        layers = [state - 1 for state in auxiliary.states_of(draft)]
        given = config.get("dflash_config") or {}
        section = {"mask_token_id": draft.mask_token, "target_layer_ids": layers} | given
        return config | {"architectures": [DFLASH], "dflash_config": section}

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        """Extend its RoPE to the end of the target's context, too."""
        super().finalize(config, draft)
        spec = config.speculative_config
        if config.use_v2_model_runner:
            self._make_room(config.scheduler_config, draft)
        head = spec.draft_model_config.hf_config
        if self.anchors:
            head.sample_from_anchor = self.samples_anchor(draft)
        if self.scorer is not None:
            keys = (*self.section, *self.optional)
            head.dflash_config |= {key: draft.config[key] for key in keys if key in draft.config}
        if self.cls != DFLASH:
            head.architectures = [self.cls]
            spec.update_arch_()
        head.max_position_embeddings = max(head.max_position_embeddings, spec.target_model_config.max_model_len)
        extend_context(config)
        spec.method, spec.parallel_drafting = self.scheduled_as, False

    def _make_room(self, scheduler: Any, draft: Checkpoint) -> None:
        """Let no more requests run on Model Runner V2 than those whose blocks fit a step, as vLLM 0.33 does: it writes
        them to buffers of one step's tokens without a bound."""
        running, room = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        rows = self.slots_ahead(draft)
        running = min(running, scheduler.max_num_active_seqs or running)
        if running * rows > room:
            scheduler.max_num_active_seqs = room // rows
            logger.warning(
                "of %d requests %d run at once (max_num_active_seqs): %s reads %d tokens of each in one forward, and "
                "max_num_batched_tokens=%d; raise that to %d to run all",
                running,
                room // rows,
                self.title,
                rows,
                room,
                running * rows,
            )

    def lattice(self, model: Any, config: Any, vocabulary: int, scores: Scores) -> Marginals:
        """Distributions of a tree's nodes. `model`: vLLM's, with its weights; `config`: the head's own, as vLLM reads
        it; `vocabulary`: of the target; `scores`: LiLiCorr's, which also depend on the target's states."""
        return Marginals(model, vocabulary)


class DFlash(BlockHead):
    title = "a DFlash head"
    forward = "vllm_adaptive_tree.engine.v2.block_speculator:BlockForward"
    cls = DFLASH
    speculators = "dflash"
    architecture = "(?i)dflash|museglimmerassistant"
    keys = ("dflash_config",)
    tensors = (r"hidden_norm\.",)


class DSpark(BlockHead):
    title = "a DSpark head"
    method = "dspark"  # which Model Runner V1 refuses
    forward = "vllm_adaptive_tree.engine.v2.block_speculator:MarkovBlock"
    cls = "Qwen3DSparkModel"
    other_cls: ClassVar[dict[str, str]] = {"qwen3": "DSparkDraftModel"}  # for DeepSeek's models it is another head
    section = ("markov_rank",)
    anchors = True
    speculators = "dspark"
    architecture = "(?i)dspark"
    tensors = (r"markov_head\.",)

    def lattice(self, model: Any, config: Any, vocabulary: int, scores: Scores) -> Marginals:
        return Markov(model, vocabulary, getattr(config, "dspark_draft_topk", None))


class XPress(BlockHead):
    title = "an XPress head"
    forward = "vllm_adaptive_tree.engine.v2.block_speculator:BlockForward"
    cls = "Qwen3XPressModel"
    reducible = False
    whole_block = True
    architecture = "(?i)xpress"
    tensors = (r"xpress_head\.",)

    def check_config(self, draft: Checkpoint, config: Any, vocabulary: int) -> None:
        import vllm

        super().check_config(draft, config, vocabulary)
        if minor(vllm.__version__) == "0.32":
            raise draft.refused("is an XPress head, which vLLM 0.32 does not have; use vLLM 0.33")

    def levels(self, draft: Checkpoint) -> int:
        """One less than the places that its refiner mixes, in which vLLM's kernels take the block to be."""
        size = draft.flat.get("xpress_block_size", draft.flat.get("block_size"))
        shape = (draft.tensors or {}).get(MIXER)
        if not isinstance(size, int) or size < 2 or (shape is not None and tuple(shape[-2:]) != (size, size)):
            mixes = "" if shape is None else f", and its tensor {MIXER!r} is one of {shape[-1]} places"
            raise draft.refused(
                f"says that its refiner has xpress_block_size {size!r} in its config.json{mixes}; set it to the number "
                "of tokens that it was trained with, the root included"
            )
        return size - 1

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        config.speculative_config.draft_model_config.hf_config.xpress_block_size = 1 + self.levels(draft)
        super().finalize(config, draft)

    def lattice(self, model: Any, config: Any, vocabulary: int, scores: Scores) -> Marginals:
        return Refined(model, vocabulary, getattr(config, "xpress_topc", 512))


class PairHead(BlockHead):
    """Head that scores pairs of candidates."""

    reducible = False
    scorer: ClassVar[str]

    def lattice(self, model: Any, config: Any, vocabulary: int, scores: Scores) -> Marginals:
        scorer = getattr(model.model, self.scorer)
        scorer.do_not_compile = True  # vLLM compiles it once and without guards, here for the first batch's one request
        return Pairs(model, vocabulary, self.scores(scorer, scores))

    def scores(self, scorer: Any, given: Scores) -> Scores:
        return scorer


class DFlash2(PairHead):
    title = "a DFlash2 head"
    forward = "vllm_adaptive_tree.engine.v2.block_speculator:PairBlock"
    cls = "DFlash2DraftModel"
    section = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    scorer = "candidate_selector"
    speculators = "dflash2"
    architecture = "(?i)dflash2"
    tensors = (r"candidate_selector\.",)

    def rewritten(self, draft: Checkpoint) -> dict[str, Any] | None:
        as_dflash = {"speculators_model_type": DFlash.speculators}
        return draft.config | as_dflash if "speculators_model_type" in draft.config else super().rewritten(draft)


class LiLiCorr(PairHead):
    title = "a LiLiCorr head"
    forward = "vllm_adaptive_tree.engine.v2.block_speculator:CorrelatedBlock"
    cls = "LiLiCorrDraftModel"
    section = (
        "lilicorr_candidate_topk",
        "lilicorr_num_layers",
        "lilicorr_num_heads",
        "lilicorr_mlp_ratio",
        "lilicorr_factor_dim",
        "lilicorr_vector_eps",
        "lilicorr_logit_scale",
    )
    optional = ("lilicorr_hidden_size",)
    scorer = "lilicorr"
    architecture = "(?i)lilicorr"
    tensors = (r"lilicorr\.",)

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        if config.use_v2_model_runner and config.lora_config is not None:
            raise draft.refused(
                f"is {self.title}, which on Model Runner V2 reads an embedding without LoRA; remove enable_lora, or "
                "use another draft"
            )
        super().finalize(config, draft)

    def scores(self, scorer: Any, given: Scores) -> Scores:
        return given
