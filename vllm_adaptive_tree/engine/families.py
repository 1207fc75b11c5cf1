"""Classes of targets by vLLM's name: tested with trees, or refused. One table for the checks and the docs.

`python -m tools.families` writes it into `docs/support-matrix.md`.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """Allowed, with its windows, soft-caps and sinks."""

    architecture: str  # vLLM's
    examples: str
    brings: str
    tests: tuple[str, ...]  # of `tests/engine/families.py`


class Refusal(NamedTuple):
    what: str
    examples: str
    reason: str
    test: str


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "Llama 2 and 3.x, SmolLM",
        "RoPE scaling (llama3, dynamic), biases, tied embeddings, GQA, MQA",
        ("llama", "llama-tied", "llama-bias", "llama-gptq", "llama-awq", "llama-fp8-kv"),
    ),
    Family("Qwen2ForCausalLM", "Qwen 2 and 2.5", "biases, YaRN", ("qwen2",)),
    Family("Qwen3ForCausalLM", "Qwen 3", "norms of queries and keys", ("qwen3",)),
    Family(
        "MistralForCausalLM",
        "Mistral",
        "no window, or one in every layer",
        ("mistral", "mistral-window"),
    ),
    Family("PhiForCausalLM", "Phi 1 and 2", "partial RoPE, biases; by vLLM's Transformers backend", ("phi",)),
    Family("Phi3ForCausalLM", "Phi 3 and 4", "fused projections, partial RoPE", ("phi3",)),
    Family("OlmoForCausalLM", "OLMo", "norms without weights; by vLLM's Transformers backend", ("olmo",)),
    Family("Olmo2ForCausalLM", "OLMo 2", "norms after the blocks; by vLLM's Transformers backend", ("olmo2",)),
    Family("Olmo3ForCausalLM", "OLMo 3", "windows in every other layer", ("olmo3",)),
    Family("GemmaForCausalLM", "Gemma 1", "scaled, tied embeddings", ("gemma",)),
    Family("GraniteForCausalLM", "Granite 3", "multipliers", ("granite",)),
    Family("Qwen3MoeForCausalLM", "Qwen3-30B-A3B", "experts", ("qwen3-moe",)),
    Family("MixtralForCausalLM", "Mixtral", "experts", ("mixtral",)),
    Family("GptOssForCausalLM", "gpt-oss", "sinks, windows in every other layer, experts", ("gpt-oss",)),
    Family("Gemma2ForCausalLM", "Gemma 2", "windows in every other layer, soft-caps", ("gemma2",)),
    Family("Gemma3ForCausalLM", "Gemma 3, text", "windows in every other layer, two RoPE bases", ("gemma3",)),
    Family("MinistralForCausalLM", "Ministral", "windows in every other layer", ("ministral",)),
    Family("Cohere2ForCausalLM", "Command R7B, Command A", "windows with RoPE, full layers without", ("cohere2",)),
)
BY_CONFIG, BY_LAYER = "`test_what_is_refused_by_its_config`", "`test_targets_outside_the_allow_list`"
REFUSALS = (
    Refusal("multi-head latent attention", "DeepSeek V2 and V3, Kimi", "a latent cache", BY_CONFIG),
    Refusal("hybrids with linear or state-space layers", "Qwen3-Next, Jamba", "a state for every branch", BY_CONFIG),
    Refusal("layers with ALiBi, of another class or backend", "Llama 4", "by the layer's name", BY_LAYER),
    Refusal(
        "windows, soft-caps or sinks in classes that are not above",
        "EXAONE 4",
        "by the layer's name",
        "`test_a_class_without_a_test_is_refused_by_its_layer`",
    ),
)
ALLOWED = {family.architecture: family for family in FAMILIES}
