"""Tiny models of widely served classes, of random weights, and the features of each."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.engine.quantising import awq, gptq

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LAYERS = ["sliding_attention", "full_attention"] * 2
GEMMA = "gemma2", "gemma3_text", "gemma4_text"
"""Classes whose blocks end in a norm, which undoes a factor of their projections."""


class Sees(NamedTuple):
    """A class of targets that read images."""

    name: str  # of transformers, without its end
    vision: dict[str, Any]  # configuration of this part
    others: dict[str, Any]  # fields beside it


@dataclass(frozen=True)
class Family:
    config: str  # a class of transformers
    brings: str
    fields: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # of the engine
    rewrite: Callable[[Path], None] | None = None  # the checkpoint
    hybrid: bool = False  # its trees are chains (`test_hybrids.py`)
    latent: bool = False  # its attention is multi-head latent, for Model Runner V2
    sees: "Sees | None" = None  # the classes that read images too, and have it as their part for text

    @property
    def groups(self) -> int:
        """Number of groups of layers that share a block table."""
        return len(set(self.fields.get("layer_types", [""])))

    def built(self) -> PreTrainedConfig:
        return getattr(transformers, self.config)(**{**COMMON, **self.fields})

    def _model(self) -> Any:
        if not self.sees:
            return AutoModelForCausalLM.from_config(self.built(), dtype=torch.float32)
        name, vision, others = self.sees
        text = self.built()
        parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": text.tie_word_embeddings}
        config = getattr(transformers, f"{name}Config")(**parts, **others)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config).float()

    def saved(self, folder: Path, seed: int = 0) -> str:
        torch.manual_seed(seed)
        model = self._model()
        with torch.no_grad():
            spread(model)
        model.save_pretrained(folder)
        if self.rewrite is not None:
            self.rewrite(folder)
        return str(folder)


def kimi_as_published(folder: Path) -> None:
    """Rename the class, and layers that transformers 5 names as the part that sees has them; leave that part out."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["KimiK25ForConditionalGeneration"]}))
    weights = {
        name.replace(".blocks.", ".layers."): one
        for name, one in load_file(folder / "model.safetensors").items()
        if name.startswith("language_model.")
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def experts_as_published(folder: Path) -> None:
    """Transpose the weights of experts: those of Qwen3-VL are [E, in, out], and transformers 5 writes [E, out, in]."""
    weights = load_file(folder / "model.safetensors")
    for name, one in weights.items():
        if ".experts." in name:
            weights[name] = one.transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def spread(model: Any) -> None:
    """Scale weights so that logits differ and texts vary: tied embeddings are small beside the layers' output."""
    text = model.config.get_text_config()
    tied = text.tie_word_embeddings
    model.get_input_embeddings().weight.normal_(0, 0.03 if tied else 1)
    if not tied:
        model.get_output_embeddings().weight.normal_(0, 0.35)
    for name, one in model.named_parameters():
        if one.ndim == 1 and "bias" in name:
            one.normal_(0, 0.3)
        elif "norm" in name:
            one.add_(torch.randn_like(one) * 0.1)
        if tied and "o_proj" in name:  # an average over the context changes slowly, and so would the text
            one.mul_(0.3)
        if "post_attention_layernorm" in name and text.model_type in GEMMA:
            one.sub_(0.7)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


MROPE = rope("default", mrope_section=[12, 10, 10], mrope_interleaved=True)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
DYNAMIC = rope("dynamic", factor=4.0)
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 40,
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}

VISION: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "patch_size": 8,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": COMMON["hidden_size"],
}
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 16}
IMAGE_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
DELTA_NETS: dict[str, Any] = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,  # kernels that round differently may choose other experts of nearly equal scores
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
LATENT: dict[str, Any] = {  # vLLM's CPU kernel reads latents of 512 and 64 alone
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "num_key_value_heads": 4,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LOW_RANK = {"q_lora_rank": 64, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
# vLLM's norm on CPUs reads the latents of a batch, which are a part of wider rows, as if they were all. With AMX vLLM
# would read them by a backend for bfloat16 alone.
AS_ON_ANY_CPU = {"compilation_config": {"custom_ops": ["none"]}, "attention_backend": "CPU_MLA"}
QWEN35 = {
    **DELTA_NETS,
    **rope("default", partial_rotary_factor=0.5, mrope_section=[6, 5, 5], mrope_interleaved=True),
    "mtp_num_hidden_layers": 1,  # `test_hybrids.py` adds it
}
# Rounded states would tell a step of several tokens from as many steps. A CPU keeps no states of prefixes.
STATES = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}
TEXT_ALONE = {"language_model_only": True}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "RoPE scaling of Llama 3, head size 64, GQA", {"head_dim": 64, **LLAMA3}),
    "llama-tied": Family(
        "LlamaConfig",
        "tied embeddings, head size 256, MQA",
        {"head_dim": 256, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama-bias": Family(
        "LlamaConfig", "biases, dynamic RoPE scaling", {"attention_bias": True, "mlp_bias": True, **DYNAMIC}
    ),
    "qwen2": Family("Qwen2Config", "biases, YaRN", {**YARN}),
    "qwen3": Family("Qwen3Config", "norms of queries and keys, head size 128", {"head_dim": 128}),
    "phi": Family("PhiConfig", "partial RoPE, biases, parallel blocks", {"partial_rotary_factor": 0.5}),
    "phi3": Family(
        "Phi3Config",
        "fused projections, partial RoPE, head size 96",
        {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5},
    ),
    "olmo": Family("OlmoConfig", "norms without weights", {}),
    "olmo2": Family("Olmo2Config", "norms after the blocks", {}),
    "olmo3": Family(
        "Olmo3Config",
        "windows of 40 in every other layer",
        {"sliding_window": 40, "num_hidden_layers": 4, "layer_types": LAYERS},
    ),
    "gemma": Family(
        "GemmaConfig",
        "scaled, tied embeddings, head size 256, MQA",
        {"head_dim": 256, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "granite": Family(
        "GraniteConfig",
        "multipliers",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.1, "logits_scaling": 0.8},
    ),
    "glm4-moe": Family(
        "Glm4MoeConfig",
        "8 experts, 2 per token, one shared, a dense layer first, partial RoPE",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        "8 experts, 4 per token",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Family("MixtralConfig", "4 experts, 2 per token", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": Family(
        "GptOssConfig",
        "sinks, windows of 40 in every other layer, 8 experts",
        {
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 40,
            "layer_types": LAYERS,
            "num_hidden_layers": 4,
            **rope(
                "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, truncate=False
            ),
        },
    ),
    "gemma2": Family(
        "Gemma2Config",
        "windows of 40 in every other layer, soft-caps",
        {
            "head_dim": 64,
            "sliding_window": 40,
            "num_hidden_layers": 4,
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "windows of 33 in every other layer, two RoPE bases",
        {
            "head_dim": 64,
            "sliding_window": 33,
            "num_hidden_layers": 4,
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": Family("Gemma4TextConfig", "windows of 40 in every other layer, heads of two sizes, K for V", GEMMA4),
    "gemma4-moe": Family(
        "Gemma4TextConfig",
        "8 experts, 2 per token, beside the dense layer",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "mistral": Family(
        "MistralConfig", "head size 80, MHA", {"head_dim": 80, "num_key_value_heads": 4, "sliding_window": None}
    ),
    "mistral-window": Family("MistralConfig", "a window of 37 in every layer", {"sliding_window": 37}),
    "ministral": Family(
        "MinistralConfig",
        "windows of 64 in every other layer",
        {"sliding_window": 64, "num_hidden_layers": 4, "layer_types": LAYERS, "head_dim": 32},
    ),
    "cohere2": Family(
        "Cohere2Config",
        "windows of 48 with RoPE, full layers without",
        {
            "sliding_window": 48,
            "num_hidden_layers": 4,
            "layer_types": LAYERS,
            "tie_word_embeddings": True,
            "logit_scale": 4.0,
        },
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        "gated delta nets but for the last layer, gated attention, 4 experts",
        {**DELTA_NETS, **EXPERTS},
        STATES,
        hybrid=True,
    ),
    "qwen3.5": Family(
        "Qwen3_5TextConfig",
        "gated delta nets but for the last layer, gated attention, M-RoPE of three parts",
        QWEN35,
        {**STATES, **TEXT_ALONE},
        hybrid=True,
        sees=Sees("Qwen3_5", QWEN3_VISION, IMAGE_TOKENS),
    ),
    "qwen3.5-text": Family("Qwen3_5TextConfig", "a checkpoint without images", QWEN35, STATES, hybrid=True),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeTextConfig",
        "4 experts",
        {**QWEN35, **EXPERTS},
        {**STATES, **TEXT_ALONE},
        hybrid=True,
        sees=Sees("Qwen3_5Moe", QWEN3_VISION, IMAGE_TOKENS),
    ),
    "deepseek-v2": Family(
        "DeepseekV2Config",
        "latent attention, 8 experts, 2 per token, a dense layer first",
        {**LATENT, **ROUTED},
        AS_ON_ANY_CPU,
        latent=True,
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        "latent attention with queries of low rank, 8 experts in groups, YaRN",
        {**LATENT, **ROUTED, **LOW_RANK, **YARN, "n_group": 2},
        AS_ON_ANY_CPU,
        latent=True,
    ),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteConfig",
        "latent attention with queries of low rank, 8 experts",
        {**LATENT, **ROUTED, **LOW_RANK},
        AS_ON_ANY_CPU,
        latent=True,
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLTextConfig",
        "M-RoPE of three parts, one after the other",
        {**rope("default", mrope_section=[6, 5, 5])},
        TEXT_ALONE,
        sees=Sees("Qwen2_5_VL", {**QWEN_VISION, "fullatt_block_indexes": [0], "window_size": 16}, IMAGE_TOKENS),
    ),
    "qwen3-vl": Family(
        "Qwen3VLTextConfig",
        "M-RoPE of three interleaved parts",
        {"head_dim": 64, **MROPE},
        TEXT_ALONE,
        sees=Sees("Qwen3VL", {**QWEN3_VISION, "deepstack_visual_indexes": [0]}, IMAGE_TOKENS),
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeTextConfig",
        "8 experts, 4 per token",
        {
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            **MROPE,
        },
        TEXT_ALONE,
        experts_as_published,
        sees=Sees("Qwen3VLMoe", {**QWEN3_VISION, "deepstack_visual_indexes": [0]}, IMAGE_TOKENS),
    ),
    "kimi-k2.5": Family(
        "DeepseekV3Config",
        "as DeepSeek V3, beside a part that sees",
        {**LATENT, **ROUTED, **LOW_RANK, **YARN},
        {**AS_ON_ANY_CPU, **TEXT_ALONE},
        kimi_as_published,
        latent=True,
        sees=Sees("Kimi_K25", VISION, {"image_token_id": 500, "projection_hidden_size": VISION["hidden_size"]}),
    ),
    "llama-fp8-kv": Family("LlamaConfig", "K/V in 8 bits", {"head_dim": 64}, {"kv_cache_dtype": "fp8"}),
    "llama-e5m2-kv": Family("LlamaConfig", "K/V in 8 bits", {"head_dim": 64}, {"kv_cache_dtype": "fp8_e5m2"}),
    "llama-gptq": Family("LlamaConfig", "weights of 4 bits by GPTQ", {"head_dim": 64}, {"dtype": "bfloat16"}, gptq),
    "llama-awq": Family("LlamaConfig", "weights of 4 bits by AWQ", {"head_dim": 64}, {"dtype": "bfloat16"}, awq),
}

for name, family, sees in (
    ("gemma3", "gemma3-vl", Sees("Gemma3", {**VISION, "image_size": 32}, {"mm_tokens_per_image": 4})),
    ("gemma4", "gemma4-vl", Sees("Gemma4", {**VISION, "num_key_value_heads": 2, "head_dim": 32}, {})),
    ("mistral", "mistral3", Sees("Mistral3", {**VISION, "image_size": 32}, {"image_token_index": 500})),
):
    FAMILIES[family] = replace(FAMILIES[name], arguments=TEXT_ALONE, sees=sees)

SHORT = ("llama", "phi", "qwen3-moe", "gpt-oss", "gemma2")
"""Families that together have scaled and partial RoPE, biases, experts, windows, soft-caps and sinks."""
