"""Fake of vLLM's CUDA platform on a machine without a GPU, for tests alone.

vLLM's Python for GPUs runs as it is: configuration, choice of the attention backend, layers, metadata builders, worker,
Model Runner V2 with its warm-up and memory profile. Its Triton kernels and ours run in the interpreter. Kernels that
are compiled for GPUs alone (FlashAttention, the write to the cache, the sorting of rows by expert) are functions here,
called with the same arguments. Tensors that vLLM puts on "cuda" are on the CPU. A process that has called `install`
serves no other purpose.
"""

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests import interpreter

MEMORY = 80 << 30
MULTIPROCESSORS = 12  # an H100 has 132; a launch has as many programs, and each takes a millisecond here
QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
"""Queries for kernels for quantised weights."""


class Launch(NamedTuple):
    """One call of a compiled attention kernel."""

    kernel: str
    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any]


LAUNCHES: list[Launch] = []


def install(capability: tuple[int, int]) -> None:
    """Install the fake; must run before vLLM or Triton is imported."""
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"
    )
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # of unseeded top-p alone; it is not installed here
    interpreter.install("v2")
    interpreter.after("vllm_adaptive_tree.engine.v2.device", lambda module: setattr(module, "compiles", lambda _: True))
    for compiled in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{compiled}"] = ModuleType(compiled)
    for compiled in ("_vllm_fa2_C", "_vllm_fa3_C", "cute", "cute.interface"):
        sys.modules[f"vllm.vllm_flash_attn.{compiled}"] = ModuleType(compiled)
    for other in ("minimax_m3_msa_warmup", "step5_dsa_warmup", "qwen_triton_warmup"):
        module = sys.modules[f"vllm.model_executor.warmup.{other}"] = ModuleType("needs torchvision, or minutes")
        setattr(module, other, lambda *_: None)
    interpreter.after("vllm.model_executor.warmup.kernel_warmup", _without_others)
    interpreter.after("vllm.v1.worker.workspace", _workspace)
    interpreter.after("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", _delta_rule)
    interpreter.after("vllm.third_party.flash_linear_attention.ops.op", _by_name)
    interpreter.after("vllm.v1.worker.mamba_utils", _aligned_states)
    sys.modules["vllm.vllm_flash_attn.cute.interface"]._flash_attn_fwd = _fa4  # type: ignore[attr-defined]
    interpreter.after("vllm.vllm_flash_attn.flash_attn_interface", _has_fa4)
    namespaces: Any = torch.ops
    accelerator: Any = torch.accelerator
    for space in ("_C", "_moe_C"):
        getattr(namespaces, space).__class__ = Namespace
    for question in QUESTIONS:
        setattr(namespaces._C, question, lambda *_: False)
    for kernel in (topk_softmax, moe_align_block_size, moe_sum):
        setattr(namespaces._moe_C, kernel.__name__, kernel)
    namespaces._C.rms_norm = rms_norm
    namespaces._C.rotary_embedding = Present("rotary_embedding", rotary_embedding)
    namespaces._C.static_scaled_fp8_quant = Present("static_scaled_fp8_quant", in_8_bits)
    namespaces._vllm_fa2_C = SimpleNamespace(varlen_fwd=_fa2)
    namespaces._vllm_fa3_C = SimpleNamespace(fwd=_fa3, get_scheduler_metadata=_scheduler_metadata)
    namespaces._C.merge_attn_states = merge_attn_states
    namespaces._C_cache_ops = SimpleNamespace(
        reshape_and_cache_flash=_write,
        concat_and_cache_mla=concat_and_cache_mla,
        gather_and_maybe_dequant_cache=gather_and_maybe_dequant_cache,
    )

    import vllm.platforms as platforms
    from vllm.platforms.interface import DeviceCapability

    _accelerator(capability)
    _shapes()
    OnCPU().__enter__()

    from vllm.platforms.cuda import CudaPlatformBase

    class Faked(CudaPlatformBase):
        dist_backend = "gloo"
        dispatch_key = "CPU"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "no GPU"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY

        @classmethod
        def device_count(cls) -> int:
            return 1

    platforms._current_platform = Faked()
    import vllm.v1.worker.cpu.shm  # noqa: F401  streams and events
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()  # those for this processor

    accelerator.get_memory_info = lambda *_: (MEMORY, MEMORY)


class Absent:
    """A compiled kernel that only a GPU has. vLLM's passes of compilation name many, and no test runs one."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, overload: str) -> "Absent":
        if overload.startswith("__"):
            raise AttributeError(overload)
        return Absent(f"{self.name}.{overload}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} is compiled for GPUs alone")


class Present(Absent):
    """One that vLLM's passes name, too, and that has a function here."""

    def __init__(self, name: str, function: Callable[..., Any]):
        super().__init__(name)
        self.function = function

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.function(*args, **given)


class Namespace(type(torch.ops._C)):  # type: ignore[misc]
    """Namespace of operations in which every name exists, as in a build for GPUs."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return Absent(name)


class OnCPU(TorchFunctionMode):
    """Mode that moves every tensor asked for on "cuda" to the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device:
            return function(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = _moved(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*(_moved(one) for one in args), **kwargs)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _shapes() -> None:
    """Register the shapes that vLLM tells PyTorch of its kernels, of those that are here."""
    library: Any = torch.library
    original = library.register_fake

    def register_fake(name: Any, *arguments: Any, **given: Any) -> Any:
        space, _, kernel = str(name).partition("::")
        absent = kernel and isinstance(getattr(getattr(torch.ops, space), kernel, None), Absent)
        return (lambda function: function) if absent else original(name, *arguments, **given)

    library.register_fake = register_fake


def _accelerator(capability: tuple[int, int]) -> None:
    accelerator: Any = torch.accelerator
    cuda: Any = torch.cuda
    properties = {"multi_processor_count": MULTIPROCESSORS, "is_integrated": False, "total_memory": MEMORY}
    cuda.get_device_properties = lambda *_: SimpleNamespace(**properties, major=capability[0], minor=capability[1])
    cuda.reset_peak_memory_stats, cuda.max_memory_allocated = lambda *_: None, lambda *_: 0
    cuda.memory.get_allocator_backend = lambda: "none"
    cuda.set_sync_debug_mode = lambda _: None
    cuda.get_device_capability, cuda.current_device = lambda *_: capability, lambda: "cpu"
    accelerator.device_count = lambda: 1
    accelerator.set_device_index = lambda *_: None
    accelerator.current_device_index = lambda: 0
    accelerator.memory_stats = lambda *_: {}
    for figure in ("memory_reserved", "memory_allocated", "max_memory_allocated"):
        setattr(accelerator, figure, lambda *_: 0)
    accelerator.empty_host_cache = lambda: None
    accelerator.reset_peak_memory_stats = lambda *_: None


def _attention(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    causal: bool,
    scales: Sequence[Tensor | None] = (None,) * 3,
    q_v: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """Attention over a paged cache: `k`, `v` [blocks, block_size, Hkv, D]; `scales` [requests, Hkv], of `q`, `k`, `v`
    of 8 bits. `q_v` [rows, H, Dv]: queries of the values, whose scores are added."""
    LAUNCHES.append(Launch(kernel, q, k, v, {"out": out, **arguments}))
    starts, lengths, table = arguments["cu_seqlens_q"], arguments["seqused_k"], arguments["block_table"]
    group = q.shape[1] // k.shape[2]
    for request, length in enumerate(lengths.tolist()):
        first, last = starts[request : request + 2].tolist()
        if first == last:
            continue
        blocks = table[request, : -(-length // k.shape[1])].long()
        keys, values = (one[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float() for one in (k, v))
        query, keys, values = (
            one if scale is None else one * scale[request].repeat_interleave(group)[:, None]
            for one, scale in zip((q[first:last].float(), keys, values), scales, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys)
        if q_v is not None:
            scores += torch.einsum("qhd,khd->hqk", q_v[first:last].float(), values)
        scores *= arguments["softmax_scale"]
        row, column = torch.arange(length - (last - first), length)[:, None], torch.arange(length)
        weights = scores.masked_fill((column > row) & causal, -torch.inf).softmax(-1)
        if kernel == "FA3" and k.element_size() == 1:
            weights = of_8_bits(weights)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


def of_8_bits(weights: Tensor) -> Tensor:
    """Weights as FlashAttention 3 multiplies them with values of 8 bits: the largest of a row becomes 256."""
    factor = 256 / weights.amax(-1, keepdim=True)
    return (weights * factor).to(torch.float8_e4m3fn).float() / factor


def _fa2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor,
    leftpad_k: None,
    block_table: Tensor,
    alibi_slopes: None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    num_splits: int,
    generator: None,
) -> tuple[Tensor, None]:
    assert (window_left, window_right, softcap, p_dropout) == (-1, -1, 0, 0)
    assert (leftpad_k, alibi_slopes, return_softmax) == (None, None, False)
    where = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "block_table": block_table}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _attention("FA2", q, k, v, out, causal=is_causal, softmax_scale=softmax_scale, **where, **longest), None


def _unpaged(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of rows to keys [tokens, H, D] of the same requests, one after the other, and its log-sum-exp."""
    out, logs = q.new_zeros(*q.shape[:2], v.shape[2]), torch.full((q.shape[1], len(q)), -torch.inf)
    for first, last, begin, end in zip(
        starts.tolist(), starts[1:].tolist(), key_starts.tolist(), key_starts[1:].tolist(), strict=False
    ):
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k[begin:end].float()) * scale
        row, column = torch.arange(end - begin - (last - first), end - begin)[:, None], torch.arange(end - begin)
        scores = scores.masked_fill((column > row) & causal, -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[begin:end].float()).to(out.dtype)
        logs[:, first:last] = scores.logsumexp(-1)
    return out, logs


def _fa3(*arguments: Any) -> tuple[Tensor, Tensor | None, None, None]:
    """Attend as upstream's `fwd`; new keys, rotation and padding are not used. Keys that are not paged are those of
    prompts of latent layers, which want a log-sum-exp."""
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, _, _, seqused_k, max_q, max_k, table = arguments[:15]
    scale, causal, left, right, softcap = arguments[23:28]
    assert (k_new, v_new, left, right, softcap) == (None, None, -1, -1, 0)
    if table is None:
        LAUNCHES.append(Launch("FA3", q, k, v, {}))
        attended, log = _unpaged(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal=causal)
        return attended if out is None else out.copy_(attended), log, None, None
    assert cu_seqlens_k is None
    out = torch.empty(*q.shape[:2], v.shape[3], dtype=q.dtype) if out is None else out
    where = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "block_table": table}
    longest = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    assert len({one.dtype.itemsize for one in (q, k, v)}) == 1, "queries have 8 bits where the cache has"
    given = {"scales": arguments[20:23], "softmax_scale": scale, "q_v": q_v, **where, **longest}
    return _attention("FA3", q, k, v, out, causal=causal, **given), None, None, None


def _fa4(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, page_table: Tensor, causal: bool, softcap: float, **given: Any
) -> tuple[Tensor, None, None, None]:
    assert softcap == 0
    for absent in ("cu_seqlens_k", "window_size_left", "window_size_right", "mask_mod", "learnable_sink"):
        assert given.pop(absent) is None
    scales = [given.pop(name) for name in ("q_descale", "k_descale", "v_descale")]
    given |= {"block_table": page_table, "scales": scales}
    return _attention("FA4", q, k, v, out, causal=causal, **given), None, None, None


def _scheduler_metadata(batch_size: int, *_: Any) -> Tensor:
    return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32)


def _write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    assert kv_cache_dtype in ("auto", "fp8")
    size = key_cache.shape[1]
    rows = (slot_mapping >= 0).nonzero().flatten()
    slot = slot_mapping[rows]
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        if cache.dtype == torch.uint8:
            new = in_8_bits(torch.empty_like(new, dtype=torch.float8_e4m3fn), new, scale).view(torch.uint8)
        cache[slot // size, slot % size] = new[rows]


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    assert kv_cache_dtype == "auto"
    rows = (slot_mapping >= 0).nonzero().flatten()
    slot, size = slot_mapping[rows], cache.shape[1]
    cache[slot // size, slot % size] = torch.cat([kv_c, k_pe.view(len(k_pe), -1)], -1)[rows]


def gather_and_maybe_dequant_cache(
    cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    starts: Tensor,
    token_to_request: Tensor,
    tokens: int,
    kv_cache_dtype: str,
    scale: Tensor,
    begins: Tensor | None,
) -> None:
    """Gather latents of contexts, from the position where each begins."""
    request = token_to_request[:tokens].long()
    position = torch.arange(tokens) - starts[request] + (0 if begins is None else begins[request])
    out[:tokens] = cache[block_table[request, position // cache.shape[1]].long(), position % cache.shape[1]]


def merge_attn_states(
    out: Tensor,
    out_log: Tensor | None,
    one: Tensor,
    one_log: Tensor,
    other: Tensor,
    other_log: Tensor,
    merged: int | None,
    scale: None,
) -> None:
    """Merge two parts of attention [rows, H, D] by their log-sum-exp [H, rows], those of the first `merged` rows."""
    assert (out_log, scale) == (None, None)
    merged = len(out) if merged is None else merged
    share = torch.sigmoid(one_log[:, :merged] - other_log[:, :merged]).T[:, :, None]
    out.copy_(other)
    out[:merged] = (one[:merged].float() * share + other[:merged].float() * (1 - share)).to(out.dtype)


def in_8_bits(out: Tensor, rows: Tensor, scale: Tensor, group_shape: tuple[int, int] | None = None) -> Tensor:
    """Quantise to `out`, by one scale for all, or one for each group of columns."""
    most = torch.finfo(out.dtype).max
    if scale.numel() > 1:
        scale = scale.repeat_interleave(rows.shape[-1] // scale.numel())
    return out.copy_((rows.float() / scale).clamp(-most, most))


def rms_norm(out: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> None:
    """Norm rows in place of vLLM's CPU kernel, which reads rows as if they were contiguous; those of queries between
    keys and values are not."""
    out.copy_(torch.nn.functional.rms_norm(rows.float(), weight.shape, weight.float(), epsilon))


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin: Tensor, neox: bool, *unused: Any
) -> None:
    """Rotate in place of vLLM's CPU kernel, which reads keys as if they were contiguous; those of latents are not."""
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, -1)
    size = 2 * cos.shape[-1]
    for rows in (query, key):
        if rows is not None:
            whole = rows.reshape(len(rows), -1, head_size).float()
            first, second = whole[..., :size].chunk(2, -1) if neox else (whole[..., :size:2], whole[..., 1:size:2])
            turned = first * cos - second * sin, second * cos + first * sin
            whole[..., :size] = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
            rows.copy_(whole.view(rows.shape))


def topk_softmax(
    weights: Tensor, ids: Tensor, indices: Tensor, logits: Tensor, renormalize: bool, bias: None, padding: Tensor | None
) -> None:
    assert bias is None
    best, which = logits.float().softmax(-1).topk(weights.shape[1])
    weights.copy_(best / best.sum(-1, keepdim=True) if renormalize else best)
    ids.copy_(which)


def moe_align_block_size(
    ids: Tensor, experts: int, block: int, order: Tensor, expert_ids: Tensor, total: Tensor, *unused: None
) -> None:
    """Sort rows by expert, each expert's padded to whole blocks."""
    flat, end = ids.flatten(), 0
    order.fill_(len(flat))
    for expert in range(experts):
        rows = (flat == expert).nonzero().flatten()
        blocks = -(-len(rows) // block)
        order[end : end + len(rows)] = rows
        expert_ids[end // block : end // block + blocks] = expert
        end += blocks * block
    total.fill_(end)


def moe_sum(rows: Tensor, out: Tensor, *unused: None) -> None:
    out.copy_(rows.sum(1))


def _has_fa4(module: Any) -> None:
    """Make FlashAttention 4 found: vLLM looks for a file."""
    module.FA4_AVAILABLE = True


def _without_others(module: Any) -> None:
    """Skip warm-ups: vLLM imports kernels of models that read images, and of some models' routers on 10.0; torchvision
    and CUTLASS are not installed here."""
    module.qwen_vl_triton_warmup = lambda _: None
    module._warmup_bf16x3_router_gemm = lambda *_: None


def _workspace(module: Any) -> None:
    """Move the workspace of the experts, which is made inside a custom operation, where PyTorch disables `OnCPU`."""
    manager: Any = module.WorkspaceManager
    original = manager.__init__
    manager.__init__ = lambda self, device, *rest, **given: original(self, _moved(device), *rest, **given)


class OnCUDA(Tensor):
    is_cuda = True


def _aligned_states(module: Any) -> None:
    """States of prefixes: vLLM asserts where the lengths are."""
    context: Any = module.MambaSpecDecodeGPUContext
    original = context.compute_aligned_state_indices
    context.compute_aligned_state_indices = lambda self, lengths, *rest: original(
        self, lengths.as_subclass(OnCUDA), *rest
    )


def _by_name(module: Any) -> None:
    """Look an operation up when it is called: the interpreter puts its own in place while a kernel runs."""
    import triton.language as tl

    for name in ("exp", "exp2", "log", "log2"):
        setattr(module, name, lambda *args, _name=name, **given: getattr(tl, _name)(*args, **given))


def _delta_rule(module: Any) -> None:
    """The kernel of prompts of gated delta nets takes the interpreter minutes, and overflows there."""
    module.ChunkGatedDeltaRule.forward_native = gated_delta_rule


def gated_delta_rule(
    _: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """Token by token: decay, and write what the key's value lacks (arXiv 2412.06464). `q`, `k`, `v` [1, tokens, H, D],
    `g`, `beta` [1, tokens, H], `initial_state` [sequences, H, V, K]."""
    assert output_final_state
    assert not given["use_qk_l2norm_in_kernel"]
    assert given.get("core_attn_out") is None
    out, states = torch.empty_like(v), initial_state.float().clone()
    group, bounds = v.shape[2] // k.shape[2], cu_seqlens.tolist()
    for state, first, last in zip(states, bounds, bounds[1:], strict=False):
        for token in range(first, last):
            query, key = (one[0, token].float().repeat_interleave(group, 0) for one in (q, k))
            state *= g[0, token].float().exp()[:, None, None]
            lack = v[0, token].float() - torch.einsum("hvk,hk->hv", state, key)
            state += (lack * beta[0, token].float()[:, None])[:, :, None] * key[:, None]
            out[0, token] = torch.einsum("hvk,hk->hv", state, query) * key.shape[-1] ** -0.5
    return out, states


def watch_trees() -> list[dict[str, Any]]:
    """Arguments of every launch of the tree kernel from now on: shape, stride and type of each tensor."""
    from vllm_adaptive_tree.attention import triton_tree

    found, original = list[dict[str, Any]](), triton_tree.tree_attention
    names = ("query", "keys", "values", "block_table", "row_start", "context", "ancestors", "scale", "out")

    def tree_attention(*arguments: Any, **given: Any) -> Tensor:
        found.append(
            {
                name: [list(one.shape), list(one.stride()), str(one.dtype)] if isinstance(one, Tensor) else one
                for name, one in zip(names, arguments, strict=True)
            }
        )
        return original(*arguments, **given)

    triton_tree.tree_attention = tree_attention
    return found


def watch_verdicts() -> list[Any]:
    """Verdicts of every start-up check from now on."""
    from vllm_adaptive_tree.engine.self_check import check

    found, original = list[Any](), check.check

    def watched(*arguments: Any, **given: Any) -> Any:
        found.append(original(*arguments, **given))
        return found[-1]

    check.check = watched
    return found


def watch_kernels() -> set[tuple[str, ...]]:
    """What Triton would compile from now on: a kernel of this package, with what each argument is specialized for."""
    from triton.runtime.interpreter import InterpretedFunction

    found, original = set[tuple[str, ...]](), InterpretedFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        if self.fn.__module__.startswith("vllm_adaptive_tree."):
            values = {**dict(zip(self.arg_names, arguments, strict=False)), **given}
            found.add((self.fn.__name__, *(f"{name}: {_specialized(self, name, one)}" for name, one in values.items())))
        return original(self, *arguments, grid=grid, warmup=warmup, **given)

    InterpretedFunction.run = run
    return found


def _specialized(kernel: Any, name: str, value: Any) -> str:
    """What a launch is specialized for by an argument: as `JITFunction` has it."""
    if kernel.fn.__annotations__.get(name) is not None or name not in kernel.arg_names:  # a constexpr, or an option
        return repr(value)
    loose = [*(kernel.kwargs["do_not_specialize"] or ()), *(kernel.kwargs["do_not_specialize_on_alignment"] or ())]
    if isinstance(value, Tensor):
        return f"{value.dtype}{'' if name in loose or value.data_ptr() % 16 else ', aligned'}"
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    special = "1" if value == 1 else "of 16" if value % 16 == 0 else ""
    return "long" if value >= 1 << 31 else f"int {'' if name in loose else special}"
