"""Arguments of a GPU's engine, and refused devices, before anything is loaded."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum, DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from benchmarks.gpu.sizes import capture_sizes
from tests.engine.engines import TARGET
from vllm_adaptive_tree.engine.targets import gpu_arguments, latents
from vllm_adaptive_tree.engine.v2.graphs import with_fullest


def platform(kind: str, capability: tuple[int, int] | None = None) -> Platform:
    """vLLM's interface of a platform, which answers for it."""

    class Answers(Platform):
        _enum = PlatformEnum[kind]
        device_name = kind.lower()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
            return None if capability is None else DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "this card"

        @classmethod
        def get_cpu_architecture(cls) -> CpuArchEnum:
            return CpuArchEnum.X86

    return Answers()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (platform("ROCM", (9, 4)), ["NVIDIA", "'rocm'", "draft_model"]),
        (platform("XPU"), ["NVIDIA", "'xpu'"]),
        (platform("TPU"), ["NVIDIA", "'tpu'"]),
        (platform("CUDA", (7, 5)), ["8.0", "this card is 7.5", "bfloat16"]),
        (platform("CUDA"), ["8.0", "unknown"]),
    ],
    ids=["ROCm", "XPU", "TPU", "sm_75", "unknown"],
)
def test_refused_devices(found: Platform, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_arguments, "current_platform", found)
    with pytest.raises(ValueError, match=words[0]) as error:
        gpu_arguments.check_device()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_no_nvidia_gpu_that_the_kernels_are_compiled_for_is_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_arguments, "current_platform", platform("CUDA", capability))
    gpu_arguments.check_device()


def built(
    target: torch.dtype,
    draft: torch.dtype,
    *,
    fused: bool = False,
    cache: str = "auto",
    draft_cache: str | None = None,
    schemes: Sequence[str] = (),
    by: str = "compressed-tensors",
) -> Any:
    """A VllmConfig of models and caches of these dtypes; `schemes`: models whose checkpoints have a cache scheme, `by`
    this method."""
    scheme = {"quant_method": by, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    target_model, draft_model = (
        SimpleNamespace(
            dtype=one, model=name, hf_config=SimpleNamespace(quantization_config=scheme if name in schemes else {})
        )
        for one, name in ((target, "target"), (draft, "draft"))
    )
    compilation = CompilationConfig(cudagraph_mode="PIECEWISE", pass_config={"fuse_attn_quant": fused})
    return SimpleNamespace(
        compilation_config=compilation,
        model_config=target_model,
        cache_config=SimpleNamespace(cache_dtype=cache),
        speculative_config=SimpleNamespace(draft_model_config=draft_model, kv_cache_dtype=draft_cache),
    )


def test_float32_is_refused() -> None:
    gpu_arguments.check_config(built(torch.float16, torch.bfloat16))
    for dtypes, name in (
        ((torch.float32, torch.bfloat16), "dtype="),
        ((torch.bfloat16, torch.float32), "the draft's dtype="),
    ):
        with pytest.raises(ValueError, match=f"^{name}.*use dtype='bfloat16' or 'float16'"):
            gpu_arguments.check_config(built(*dtypes))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("where", ["cache", "draft_cache"])
def test_k_v_of_8_bits_where_flash_attention_reads_it(
    where: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_arguments, "current_platform", platform("CUDA", capability))
    config = built(torch.bfloat16, torch.bfloat16, **{where: "fp8"})
    if capability[0] in (9, 10):
        gpu_arguments.check_config(config)
        return
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype.*='fp8' .* on this card: .* 9\.x and 10\.x alone; use 'bfloat16'"
    ):
        gpu_arguments.check_config(config)


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_checkpoint_that_asks_for_8_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_arguments, "current_platform", platform("CUDA", (8, 9)))
    config = built(torch.bfloat16, torch.bfloat16, schemes=[model])
    with pytest.raises(ValueError, match=rf"kv_cache_dtype.*='auto' .*kv_cache_scheme.*'{model}'.*use 'bfloat16'"):
        gpu_arguments.check_config(config)
    gpu_arguments.check_config(built(torch.bfloat16, torch.bfloat16, cache="bfloat16", schemes=[model]))
    gpu_arguments.check_config(built(torch.bfloat16, torch.bfloat16, schemes=[model], by="modelopt"))
    monkeypatch.setattr(gpu_arguments, "current_platform", platform("CUDA", (9, 0)))
    gpu_arguments.check_config(config)


def test_attention_that_quantises_is_refused() -> None:
    """vLLM then takes the attention into the pieces, and whole graphs in the place of the piecewise ones that it was
    asked for."""
    with pytest.raises(ValueError, match=r"^compilation_config.*'fuse_attn_quant'.*set it to false"):
        gpu_arguments.check_config(built(torch.float16, torch.float16, fused=True))


FLASH = AttentionBackendEnum.FLASH_ATTN


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"attention_backend": "auto"},
        {"attention_backend": "FLASH_ATTN"},
        {"attention_backend": FLASH},
        {"attention_config": {"backend": "FLASH_ATTN"}},
        {"attention_config": {"flash_attn_version": 2}},
    ],
    ids=str,
)
def test_flash_attention_is_asked_for(given: dict[str, Any]) -> None:
    args = EngineArgs(model=TARGET, **given)
    before = args.attention_config
    gpu_arguments.set_backend(args)
    config = EngineArgs(
        model=TARGET, attention_backend=args.attention_backend, attention_config=args.attention_config
    ).create_engine_config()
    assert config.attention_config.backend == FLASH
    assert config.attention_config.flash_attn_version == before.flash_attn_version
    assert before.backend in (None, FLASH)
    assert before == EngineArgs(model=TARGET, **given).attention_config, "the user's own is as it was"


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": "FLASHINFER"},
        {"attention_config": {"backend": "FLASHINFER"}},
        {"attention_config": {"backend_per_kind": {"full_attention": "FLASHINFER"}}},
    ],
    ids=str,
)
def test_other_backends_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention_backend='FLASHINFER' .*; remove it, or use 'FLASH_ATTN'"):
        gpu_arguments.set_backend(EngineArgs(model=TARGET, **given))


OF_LATENTS = AttentionBackendEnum.FLASHINFER_MLA


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, None),
        ({"attention_backend": "FLASH_ATTN"}, None),
        ({"attention_backend": "FLASHINFER_MLA"}, OF_LATENTS),
        ({"attention_config": {"backend": "FLASHINFER_MLA"}}, OF_LATENTS),
        ({"attention_config": {"backend_per_kind": {"mla_attention": "FLASHINFER_MLA"}}}, OF_LATENTS),
    ],
    ids=str,
)
def test_latent_layers_keep_their_backend(given: dict[str, Any], own: Any, tmp_path: Path) -> None:
    """The draft's have FlashAttention."""
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    args = EngineArgs(model=str(tmp_path), **given)
    gpu_arguments.set_backend(args)
    assert (args.attention_backend, args.attention_config.backend) == (None, None)
    expected = {"full_attention": FLASH} | ({} if own is None else {"mla_attention": own})
    assert args.attention_config.backend_per_kind == expected


def latent_layer(support: QueryLenSupport = QueryLenSupport.VARLEN, **values: Any) -> Any:
    """A layer of a backend that exists on GPUs alone."""
    builder = SimpleNamespace(query_len_support=support)
    backend = SimpleNamespace(get_builder_cls=lambda: builder, get_name=lambda: f"{support.value}_MLA")
    layer = MLAAttention.__new__(MLAAttention)
    vars(layer).update(attn_backend=backend, **values)
    return layer


def test_backends_that_read_lengths_on_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of trees are known to the device alone."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    values = {"use_sparse": False, "sliding_window": None, "kv_cache_dtype": "auto"}
    latents.check_layer("layer", latent_layer(**values))
    for support in (QueryLenSupport.UNIFORM, QueryLenSupport.SINGLE_ONLY):
        with pytest.raises(ValueError, match=rf"latent attention of {support.value}_MLA, .* from the host"):
            latents.check_layer("layer", latent_layer(support, **values))


def test_latents_are_read_in_the_blocks_of_the_cache() -> None:
    layer = latent_layer(kv_cache=torch.zeros(4, 64, 576))
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=SimpleNamespace(block_size=64))
    latents.check_block_sizes({"layer": layer}, [group])
    group.kv_cache_spec.block_size = 128
    with pytest.raises(ValueError, match="block_size=128 .* varlen_MLA, which reads blocks of 64; set"):
        latents.check_block_sizes({"layer": layer}, [group])


@pytest.mark.parametrize("latent", [True, False])
def test_no_pass_writes_the_latents_of_a_draft(latent: bool) -> None:
    passes = SimpleNamespace(fuse_rope_kvcache_cat_mla=True)
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(use_mla=latent))
    compilation = SimpleNamespace(pass_config=passes)
    gpu_arguments.keep_updates(SimpleNamespace(speculative_config=spec, compilation_config=compilation))
    assert passes.fuse_rope_kvcache_cat_mla is not latent


@pytest.mark.parametrize("given", [None, *(mode.name for mode in CUDAGraphMode)])
def test_the_mode_of_graphs_is_kept(given: str | None) -> None:
    args = EngineArgs(model=TARGET, compilation_config={} if given is None else {"cudagraph_mode": given})
    gpu_arguments.set_graphs(args, nodes=100, trees=256, most=2048)
    assert args.compilation_config.cudagraph_mode == (None if given is None else CUDAGraphMode[given])


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"max_num_seqs": 4}, 4 * 64),
        ({"max_num_seqs": 5}, 5 * 64),
        ({"max_num_seqs": 1}, 64),
        ({"max_num_seqs": 1000}, 2048),
        ({"max_num_seqs": 20}, 20 * 64),
        ({}, 2048),
        ({"max_cudagraph_capture_size": 16}, None),
        ({"cudagraph_capture_sizes": [1, 2]}, None),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, None),
    ],
)
def test_graphs_up_to(given: dict[str, Any], most: int | None) -> None:
    args = EngineArgs(model=TARGET, **given)
    before = CompilationConfig() if "compilation_config" not in given else args.compilation_config
    gpu_arguments.set_graphs(args, nodes=63, trees=256, most=2048)
    after = args.compilation_config
    assert after.max_cudagraph_capture_size == (most or before.max_cudagraph_capture_size)
    assert after.cudagraph_capture_sizes == before.cudagraph_capture_sizes


@pytest.mark.parametrize("tokens", [8192, 2049])
def test_the_fullest_batch_of_trees_has_a_graph(tokens: int) -> None:
    found: dict[int, list[int]] = {}
    for nodes in range(1, 129):
        for requests in range(1, 65):
            rows = min(requests * (1 + nodes), 2048)
            most = gpu_arguments.captured(rows)
            if most not in found:
                found[most] = capture_sizes(most, requests, tokens)
            assert found[most][-1] == most, "vLLM truncates another with a warning"
            assert rows <= most < rows + 16
            assert rows in with_fullest(found[most], rows), "whole graphs hold no more rows than decodes have"
    assert capture_sizes(25, 1, tokens)[-1] < 25, "without rounding"
    assert with_fullest([1, 2, 4], 25) == [1, 2, 4], "as the user gives them"
