"""Classes of targets by vLLM's name: tested with trees, or refused. One table for the checks and the docs.

`python -m tools.families` writes it into `docs/support-matrix.md`.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Family(NamedTuple):
    """Tested class of targets, allowed with its windows, soft-caps and sinks."""

    architecture: str  # vLLM's
    examples: str
    brings: str
    tests: tuple[str, ...]  # of `tests/engine/families.py`
    chains: bool = False  # its recurrent states follow chains alone


class Refusal(NamedTuple):
    what: str
    examples: str
    reason: str
    test: str


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "Llama 2 and 3.x, SmolLM",
        "RoPE scaling (llama3, dynamic), biases, tied embeddings, GQA, MQA, heads of 64 and 256",
        ("llama", "llama-tied", "llama-bias", "llama-gptq", "llama-awq", "llama-fp8-kv", "llama-e5m2-kv"),
    ),
    Family("Qwen2ForCausalLM", "Qwen 2 and 2.5", "biases, YaRN", ("qwen2",)),
    Family("Qwen3ForCausalLM", "Qwen 3", "norms of queries and keys, heads of 128", ("qwen3",)),
    Family(
        "MistralForCausalLM",
        "Mistral",
        "no window, or one in every layer; MHA, heads of 80",
        ("mistral", "mistral-window"),
    ),
    Family("PhiForCausalLM", "Phi 1 and 2", "partial RoPE, biases; by vLLM's Transformers backend", ("phi",)),
    Family("Phi3ForCausalLM", "Phi 3 and 4", "fused projections, partial RoPE, heads of 96", ("phi3",)),
    Family("OlmoForCausalLM", "OLMo", "norms without weights; by vLLM's Transformers backend", ("olmo",)),
    Family("Olmo2ForCausalLM", "OLMo 2", "norms after the blocks; by vLLM's Transformers backend", ("olmo2",)),
    Family("Olmo3ForCausalLM", "OLMo 3", "windows in every other layer", ("olmo3",)),
    Family("GemmaForCausalLM", "Gemma 1", "scaled, tied embeddings", ("gemma",)),
    Family("GraniteForCausalLM", "Granite 3", "multipliers", ("granite",)),
    Family("Qwen3MoeForCausalLM", "Qwen3-30B-A3B", "experts", ("qwen3-moe",)),
    Family("MixtralForCausalLM", "Mixtral", "experts", ("mixtral",)),
    Family("Glm4MoeForCausalLM", "GLM-4.5 and 4.6", "experts, shared ones, partial RoPE", ("glm4-moe",)),
    Family("GptOssForCausalLM", "gpt-oss", "sinks, windows in every other layer, experts", ("gpt-oss",)),
    Family("Gemma2ForCausalLM", "Gemma 2", "windows in every other layer, soft-caps", ("gemma2",)),
    Family("Gemma3ForCausalLM", "Gemma 3, text", "windows in every other layer, two RoPE bases", ("gemma3",)),
    Family(
        "Gemma4ForCausalLM",
        "Gemma 4 of 26B and 31B, text",
        "windows in every other layer, full layers with other heads, experts",
        ("gemma4", "gemma4-moe"),
    ),
    Family(
        "Gemma3ForConditionalGeneration",
        "Gemma 3 of 4B to 27B",
        "as Gemma 3; text alone (`--language-model-only`)",
        ("gemma3-vl",),
    ),
    Family("Gemma4ForConditionalGeneration", "Gemma 4 of 26B and 31B", "as Gemma 4; text alone", ("gemma4-vl",)),
    Family("Mistral3ForConditionalGeneration", "Mistral Small 3.1 and 3.2", "as Mistral", ("mistral3",)),
    Family("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", "M-RoPE", ("qwen2.5-vl",)),
    Family("Qwen3VLForConditionalGeneration", "Qwen3-VL", "interleaved M-RoPE", ("qwen3-vl",)),
    Family("Qwen3VLMoeForConditionalGeneration", "Qwen3-VL-30B-A3B", "as above, experts", ("qwen3-vl-moe",)),
    Family("MinistralForCausalLM", "Ministral", "windows in every other layer", ("ministral",)),
    Family(
        "Qwen3NextForCausalLM",
        "Qwen3-Next",
        "gated delta nets, gated attention, experts; chains of adaptive length, with vLLM 0.33",
        ("qwen3-next",),
        chains=True,
    ),
    Family(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3.5",
        "as above, M-RoPE",
        ("qwen3.5",),
        chains=True,
    ),
    Family("Qwen3_5ForCausalLM", "its text", "as above", ("qwen3.5-text",), chains=True),
    Family("Qwen3_5MoeForConditionalGeneration", "with experts", "as above", ("qwen3.5-moe",), chains=True),
    Family(
        "DeepseekV2ForCausalLM",
        "DeepSeek V2",
        "multi-head latent attention, experts; Model Runner V2",
        ("deepseek-v2",),
    ),
    Family(
        "DeepseekV3ForCausalLM", "DeepSeek V3 and R1, Kimi K2", "as above, queries of low rank, YaRN", ("deepseek-v3",)
    ),
    Family("Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", "as above", ("glm4-moe-lite",)),
    Family("KimiK25ForConditionalGeneration", "Kimi K2.5", "as DeepSeek V3; text alone", ("kimi-k2.5",)),
    Family("Cohere2ForCausalLM", "Command R7B, Command A", "windows with RoPE, full layers without", ("cohere2",)),
)
BY_CONFIG, BY_LAYER = "`test_what_is_refused_by_its_config`", "`test_what_is_refused_by_its_layer`"
REFUSALS = (
    Refusal("sparse latent attention", "DeepSeek V3.2 and V4, GLM-5", "it chooses tokens by sequence", BY_CONFIG),
    Refusal(
        "images that are read in both directions",
        "Gemma 3 and 4 with images",
        "a prompt's mask is not causal",
        "`test_images.py`",
    ),
    Refusal("other hybrids", "Jamba, LFM2", "a state for every sequence", BY_CONFIG),
    Refusal(
        "chunked attention; K/V of another layer; ALiBi; windows, soft-caps or sinks in classes that are not above",
        "Llama 4; Gemma 4 E2B and E4B; Bloom; EXAONE 4",
        "by the layer's name",
        BY_LAYER,
    ),
    Refusal(
        "layers of another class or backend", "encoders", "by the layer's name", "`test_targets_outside_the_allow_list`"
    ),
)
ALLOWED = {family.architecture: family for family in FAMILIES}


def follows_chains(architectures: Iterable[str]) -> bool:
    """Return whether trees of a target are chains, which its recurrent states follow."""
    return any(name in ALLOWED and ALLOWED[name].chains for name in architectures)
