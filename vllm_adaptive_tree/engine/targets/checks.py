"""Allow-list of supported configurations. Anything else is refused by name at start-up until it has a test."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.cpu_cache import PACKINGS
from vllm_adaptive_tree.engine.targets.connectors import check_connector
from vllm_adaptive_tree.engine.targets.families import ALLOWED, follows_chains
from vllm_adaptive_tree.engine.targets.latents import is_latent
from vllm_adaptive_tree.proposers import Proposer
from vllm_adaptive_tree.versions import minor

FP8 = "fp8", "fp8_e4m3"
"""Values of `kv_cache_dtype` for K/V of 8 bits, as FlashAttention and the tree kernel read it."""
FP8_ON_CPUS = *FP8, "fp8_e5m2"
"""As vLLM's CPU kernel reads it: Model Runner V1 alone, and no draft with K/V; the rest gathers K/V as it is."""
NO_WINDOW = None, -1, (-1, -1)
"""Values of `sliding_window` in vLLM's implementations without one, FlashAttention's the last."""
UNSUPPORTED_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # attribute of EngineArgs, what it may be, what to do
    ("pipeline_parallel_size", (1,), "use tensor_parallel_size instead"),
    ("decode_context_parallel_size", (1,), "remove it"),
    ("prefill_context_parallel_size", (1,), "remove it"),
    ("ec_transfer_config", (None,), "remove it"),
    ("worker_cls", ("auto",), "remove it: the tree method brings its own worker"),
    ("spec_method", (None,), "give 'method' inside --speculative-config"),
    ("spec_model", (None,), "give 'model' inside --speculative-config"),
    ("spec_tokens", (None,), "give 'num_speculative_tokens' inside --speculative-config"),
    ("enable_dbo", (False, None), "remove it"),
    ("offload_backend", ("auto", "uva"), "use cpu_offload_gb, which reads weights where they lie"),
    ("offload_group_size", (0,), "use cpu_offload_gb: the draft's own CUDA graphs wait for no prefetch"),
    ("cudagraph_metrics", (False, None), "remove it: the statistics of trees travel in its place"),
)


def check_arguments(args: Any) -> None:
    """Refuse engine arguments that have no test with trees. `args` is vLLM's EngineArgs."""
    for name, allowed, remedy in UNSUPPORTED_ARGUMENTS:
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not supported with a tree method; {remedy}")
    if not isinstance(args.additional_config, dict):
        raise ValueError("additional_config must be a mapping with a tree method: its options travel in it")


def check_config(config: Any, options: TreeOptions) -> None:
    """Refuse a built VllmConfig that a tree cannot serve."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    target, spec, scheduler = config.model_config, config.speculative_config, config.scheduler_config
    if not current_platform.is_cpu() and not config.use_v2_model_runner:
        raise ValueError(
            "speculative_config['method']: on a GPU tree methods run on Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER"
        )
    if config.use_v2_model_runner and not HAS_TRITON:
        raise ValueError(
            "speculative_config['method']: VLLM_USE_V2_MODEL_RUNNER=1 asks for Model Runner V2, which needs Triton; "
            "unset it"
        )
    for refused, what in (
        (target.runner_type != "generate", f"runner {target.runner_type!r}"),
        (target.is_encoder_decoder, "encoder-decoder models"),
        (target.use_mla and not is_named(target), "layers of multi-head latent attention (MLA) of this class"),
        (target.is_attention_free, "attention-free models"),
    ):
        if refused:
            raise _not_served(target, what)
    if target.is_mm_prefix_lm:
        raise ValueError(
            f"model: {target.model!r} reads the tokens of an image in both directions, which is not supported with a "
            "tree method; set language_model_only to True (--language-model-only), and leave enable_mm_embeds out"
        )
    caches: tuple[str, ...] = FP8
    if current_platform.is_cpu():
        caches = () if config.use_v2_model_runner or options.text is None else FP8_ON_CPUS
    own = own_dtype(target)
    for asked, dtype in cache_dtypes(config):
        if dtype not in ("auto", own, *caches):
            raise ValueError(
                f"{asked} is not supported with a tree method; use {own!r}, the model's own dtype. {FP8[0]!r} needs "
                "a GPU, or a CPU with Model Runner V1 and a draft without K/V of its own ('model': 'ngram' or 'suffix')"
            )
    if config.cache_config.sliding_window is not None and options.text is None:
        raise ValueError(
            f"model: {target.model!r} has a sliding window in every layer, which vLLM gives to the layers of its draft "
            "too, and drafts with windows are not supported; use 'ngram' or 'suffix' as speculative_config['model']"
        )
    for name, model in (("model", target), ("speculative_config['model']", spec.draft_model_config)):
        if model is not None and model.use_mla and not config.use_v2_model_runner:
            raise ValueError(
                f"{name}: {model.model!r} has multi-head latent attention, which is served on Model Runner V2 alone; "
                "set VLLM_USE_V2_MODEL_RUNNER=1, which needs Triton"
            )
    replicas = config.parallel_config.data_parallel_size
    for name, model in (("model", target), ("speculative_config['model']", spec.draft_model_config)):
        if replicas > 1 and model is not None and model.is_moe:
            raise ValueError(
                f"data_parallel_size={replicas} is not supported with a tree method and experts ({name}: "
                f"{model.model!r}): their ranks step together, and trees do not; run one engine per replica"
            )
    check_connector(config, options)
    if not config.use_v2_model_runner:
        check_processors(target.logits_processors)
    if config.aux_output_config.enabled:
        raise ValueError(
            "enable_return_routed_experts is not supported with a tree method: its accepted tokens are not in "
            "consecutive rows; use a chain ('draft_model')"
        )
    nodes, (limit, room) = options.num_speculative_tokens, step_limit(scheduler)
    if 2 + nodes > room:
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={nodes} does not fit {limit}={room}: one "
            f"request needs {2 + nodes} tokens in a step; lower the first to {room - 2} or raise the second"
        )


def own_dtype(model: Any) -> str:
    """A model's own type, as a value of `kv_cache_dtype`; `model`: vLLM's ModelConfig."""
    return str(model.dtype).removeprefix("torch.")


def cache_dtypes(config: Any) -> Iterator[tuple[str, str]]:
    """What a built VllmConfig asks for, in words, and the type of K/V that it gets. Where the argument is 'auto',
    vLLM's layers take 8 bits for a checkpoint of compressed-tensors with a `kv_cache_scheme`; what other checkpoints
    ask for is in the argument by then."""
    spec, dtype = config.speculative_config, config.cache_config.cache_dtype
    for name, model, asked in (
        ("kv_cache_dtype", config.model_config, dtype),
        ("speculative_config['kv_cache_dtype']", spec.draft_model_config, spec.kv_cache_dtype or dtype),
    ):
        hf_config = getattr(model, "hf_config", None)
        stored = getattr(hf_config, "quantization_config", None) or getattr(hf_config, "compression_config", None)
        given = stored if isinstance(stored, dict) and stored.get("quant_method") == "compressed-tensors" else {}
        if asked == "auto" and given.get("kv_cache_scheme"):
            yield f"{name}='auto' with a checkpoint whose kv_cache_scheme asks for 8 bits ({model.model!r})", FP8[0]
        else:
            yield f"{name}={asked!r}", asked


def check_recurrent(config: Any) -> None:
    """Refuse a built VllmConfig whose target has recurrent states that no chain can follow here."""
    import vllm

    target = config.model_config
    if not follows_chains(target.architectures):
        raise _not_served(target, "state-space or linear layers of this class")
    if minor(vllm.__version__) == "0.32":
        raise ValueError(
            f"model: {target.model!r} has linear layers, and vLLM 0.32 follows their states through chains of "
            "num_speculative_tokens alone: after a shorter one a CPU loses the inputs of their convolutions, with "
            "vLLM's own chains too; install vLLM 0.33"
        )
    if keeps_states_by_prefix(config):
        raise ValueError(
            "enable_prefix_caching is not supported with a tree method and a target with linear layers on a CPU: vLLM "
            "moves their states by a Triton kernel once it speculates; set it to False"
        )


def check_images(name: str, model: Any) -> None:
    """Refuse a loaded target that reads images or audio as no draft or tree can. `name`: as the user gives it."""
    if getattr(model, "_has_oov_mm_tokens", False):
        raise ValueError(
            f"model: {name!r} has tokens in place of images that are beyond its vocabulary, which drafts cannot read; "
            "set language_model_only to True (--language-model-only)"
        )
    if getattr(model, "supports_realtime", False):
        raise ValueError(
            f"model: {name!r} reads audio with every token it decodes, which a tree method does not support"
        )


def _not_served(target: Any, what: str) -> ValueError:
    return ValueError(
        f"model: {target.model!r} cannot be served with a tree method: {what} are not supported; "
        "use a decoder-only target with full causal attention"
    )


def keeps_states_by_prefix(config: Any) -> bool:
    """Return whether vLLM would keep recurrent states for prefixes on a CPU, where it cannot once it speculates."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and config.cache_config.mamba_cache_mode != "none"


def step_limit(scheduler: Any) -> tuple[str, int]:
    """vLLM's argument that limits the tokens of a step, and its value; `scheduler`: its SchedulerConfig."""
    name = min("max_num_batched_tokens", "max_num_scheduled_tokens", key=lambda one: getattr(scheduler, one))
    return name, getattr(scheduler, name)


def check_processors(given: Sequence[Any] | None) -> None:
    """Refuse logits processors of Model Runner V1, `given` or installed, that may keep a state of their own: vLLM
    updates it once a step, and the nodes of a tree have different histories. An `AdapterLogitsProcessor` reads a
    request's own history, to which the path to the node is added."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, cached_load_custom_logitsprocs

    base = AdapterLogitsProcessor
    for processor in cached_load_custom_logitsprocs(None if given is None else tuple(given)):
        if (
            not issubclass(processor, base)
            or processor.update_state is not base.update_state
            or processor.apply is not base.apply
        ):
            raise ValueError(
                f"logits_processors: {processor.__module__}:{processor.__qualname__} is not supported with a tree "
                "method: it may keep a state of a request between steps. Derive it from vLLM's AdapterLogitsProcessor, "
                "without `update_state` and `apply` of its own, or remove it"
            )


def check_hidden_size(proposer: Proposer, hidden_size: int | None) -> None:
    """Refuse a method that reads hidden states of another width than the draft's; None: it has no hidden states."""
    if proposer.hidden_size is not None and hidden_size is None:
        raise ValueError(
            "speculative_config['tree']['gate']: the decision model reads the draft's hidden states, and a draft "
            "without a checkpoint has none; use stop 'type2', or a draft model"
        )
    if proposer.hidden_size not in (None, hidden_size):
        raise ValueError(
            f"speculative_config['tree']['gate']: the decision model reads hidden states of {proposer.hidden_size}, "
            f"the draft's have {hidden_size}; train one for this draft with `vllm-adaptive-tree train-gate mcsd --type "
            "type1` (docs/training.md), or use stop 'type2'"
        )


def attention_layers(config: Any) -> dict[str, Any]:
    """Attention layers of the models loaded for a VllmConfig, by name. Of the other layers of vLLM's forward context,
    those with a recurrent state read the chains of hybrids as vLLM's own, and experts read every row alone."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    return {name: layer for name, layer in layers.items() if not isinstance(layer, MambaBase)}


def is_named(model: Any) -> bool:
    """Return whether a target's class is tested with its windows, soft-caps and sinks; `model`: vLLM's ModelConfig."""
    return any(architecture in ALLOWED for architecture in model.architectures)


def check_window(name: str, window: int, levels: int) -> None:
    """Refuse a layer whose window may end inside a tree of so many `levels`; 0: it has none. For Model Runner V2, whose
    mask has all ancestors of a node."""
    if 0 < window <= levels:
        raise ValueError(
            f"model: layer {name!r} has a sliding window of {window} tokens, which ends inside trees of {levels} "
            f"levels; set speculative_config['tree']['max_depth'] to at most {window - 1}"
        )


def check_draft_groups(groups: Sequence[Any], layers: Collection[str]) -> None:
    """Refuse a draft whose `layers` vLLM puts into several of its KV cache `groups`: it reads one block table. vLLM
    fills groups of equal size, so a draft's layers are split where the target's have windows."""
    held = [set(layers) & set(group.layer_names) for group in groups]
    if sum(map(bool, held)) > 1:
        raise ValueError(
            f"speculative_config['model']: vLLM parts the draft's {len(layers)} layers among "
            f"{sum(map(bool, held))} groups of its KV cache, beside a target with windows or linear layers; use a "
            "draft of one layer, a head, or 'ngram', or, beside windows, set disable_hybrid_kv_cache_manager"
        )


def check_layer(name: str, layer: Any, *, plain: bool = True, caches: Collection[str] = ()) -> None:
    """Refuse an attention layer for which a tree would be wrong.

    Args:
        layer: one of `attention_layers`.
        plain: of a draft, or of a class without a test: full causal attention with one scale alone, no windows,
            soft-caps or sinks.
        caches: types of K/V of 8 bits that it may have; a checkpoint, too, can ask for one.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    if type(layer) is not Attention:
        raise ValueError(
            f"model: layer {name!r} is a {type(layer).__name__}; a tree method needs full causal attention in every "
            "layer. Use another target, or a chain ('draft_model')"
        )
    impl = layer.impl
    backend = CPUAttentionBackendImpl if current_platform.is_cpu() else FlashAttentionImpl
    for refused, what in (
        (not isinstance(impl, backend), f"attention backend {type(impl).__name__}"),
        (layer.attn_type != AttentionType.DECODER, f"attention type {layer.attn_type}"),
        (plain and getattr(impl, "sliding_window", None) not in NO_WINDOW, "a sliding window"),
        (getattr(impl, "alibi_slopes", None) is not None, "ALiBi"),
        (plain and getattr(impl, "logits_soft_cap", 0) not in (0, None), "a soft-cap on its logits"),
        (plain and getattr(impl, "sinks", None) is not None, "attention sinks"),
        (layer.kv_sharing_target_layer_name is not None, "the KV cache of another layer"),
        (layer.head_size != layer.head_size_v, "value heads of another size"),
    ):
        if refused:
            raise ValueError(
                f"model: layer {name!r} uses {what}, which a tree method does not support; use another target, or a "
                "chain ('draft_model')"
            )
    if is_quantized_kv_cache(layer.kv_cache_dtype) and layer.kv_cache_dtype not in caches:
        raise ValueError(
            f"model: layer {name!r} uses a KV cache of {layer.kv_cache_dtype}, which a tree method does not support "
            "for it; set kv_cache_dtype to the model's own dtype"
        )


def check_packing(layers: Mapping[str, Any]) -> None:
    """Refuse a KV cache in a packing that we cannot read; known once the cache exists. `layers`: as
    `attention_layers`."""
    for name, layer in layers.items():
        if not is_latent(layer) and layer.isa not in PACKINGS:
            raise ValueError(
                f"model: vLLM packs the KV cache of layer {name!r} for {layer.isa!r} on this CPU; tree methods read "
                f"{', '.join(PACKINGS)} (x86). Use a chain ('draft_model') here"
            )
