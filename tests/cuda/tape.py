"""CUDA graphs on a CPU: a recording of every operation and kernel with its tensors.

A replay runs them again into the same memory, with the numbers and shapes of the recording, as a CUDA graph does; what
the recording has allocated holds garbage before it. vLLM's own code records and replays. Streams, reuse of memory
inside a graph, and compiled kernels are not seen.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests import interpreter
from tests.cuda import faked

GARBAGE = -777
WAITS = ("_local_scalar_dense", "aten.nonzero")
COMPILED = (
    *("_fa2", "_fa3", "_fa4", "_write", "concat_and_cache_mla", "rms_norm", "rotary_embedding"),
    *("topk_softmax", "moe_align_block_size", "moe_sum"),
)
"""Functions of `faked` that stand for one kernel."""
OPAQUE = {
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": ("qwen_gdn_attention_core",),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": ("moe_forward", "moe_forward_shared"),
}
"""Operations of vLLM in whose place the function is called: what it launches is recorded."""
ACTIVE: list["Tape | None"] = []


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


class Tape(TorchDispatchMode):
    """Records what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[Callable[..., Any], Any, Any, list[tuple[Tensor, bool]]]] = []
        """Function, its arguments, and its results: each with whether it is new memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(name in str(func) for name in WAITS):
            raise RuntimeError(f"{func} while a graph is recorded: on a device this waits, and the capture fails")
        found = func(*args, **kwargs)
        if ACTIVE and ACTIVE[-1] is self:
            given = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
            results = [(one, one.untyped_storage().data_ptr() not in given) for one in _tensors(found)]
            infos = [result.alias_info for result in func._schema.returns]
            views = infos and all(info is not None and not info.is_write for info in infos)
            if not views or any(new for _, new in results):
                self.records.append((func, args, kwargs, results))
        return found

    def launch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        ACTIVE.append(None)
        try:
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                found = function(*args, **kwargs)
        finally:
            ACTIVE.pop()
        self.records.append((function, args, kwargs, []))
        return found

    def replay(self) -> None:
        for result, new in (pair for *_, results in self.records for pair in results):
            if new and result.is_floating_point():
                result.fill_(torch.nan)
            elif new and result.dtype in (torch.int32, torch.int64):
                result.fill_(GARBAGE)
        for function, args, kwargs, results in self.records:
            found = _tensors(function(*args, **kwargs)) if results else function(*args, **kwargs)
            for (result, new), again in zip(results, found if results else (), strict=True):
                if new:
                    assert result.shape == again.shape, function
                    result.copy_(again)


class CUDAGraph:
    def __init__(self, *_: Any, **__: Any):
        self.tape: Tape | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self.tape = Tape()
        ACTIVE.append(self.tape)
        self.tape.__enter__()

    def capture_end(self) -> None:
        assert self.tape is not None
        self.tape.__exit__(None, None, None)
        ACTIVE.pop()

    def replay(self) -> None:
        assert self.tape is not None
        with torch.inference_mode():
            self.tape.replay()

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self.tape = None


class Capture:
    """`torch.cuda.graph`."""

    def __init__(self, graph: CUDAGraph, *_: Any, **__: Any):
        self.graph = graph

    def __enter__(self) -> None:
        self.graph.capture_begin()

    def __exit__(self, *_: object) -> None:
        self.graph.capture_end()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is one record of a tape."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tape = ACTIVE[-1] if ACTIVE else None
        return function(*args, **kwargs) if tape is None else tape.launch(function, args, kwargs)

    return run


def _opened(operation: str, module: ModuleType) -> None:
    function = getattr(module, operation, None) or getattr(module, f"_{operation}")
    setattr(torch.ops.vllm, operation, faked.Present(operation, function))


def _whole(operation: str, module: ModuleType) -> None:
    """An operation's function in its place, as one record: it asks the host how many adapters run."""
    setattr(module, operation, kernel(getattr(module, f"_{operation}")))


def _latent(module: ModuleType) -> None:
    """Layers of latent attention called as on a device: called directly, as others are here, they have no break between
    pieces."""
    for operation in ("unified_mla_kv_cache_update", "unified_mla_attention_with_output"):
        _opened(operation, module)
    layer: Any = module.MLAAttention
    original = layer.__init__

    def begin(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        self.use_direct_call = False

    layer.__init__ = begin


def install(capability: tuple[int, int]) -> None:
    """`faked.install`, with graphs."""
    import os

    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"  # pieces without torch.compile
    for module, operations in OPAQUE.items():
        for operation in operations:
            interpreter.after(module, functools.partial(_opened, operation))
    interpreter.after("vllm.model_executor.layers.attention.mla_attention", _latent)
    for operation in ("lora_shrink", "lora_expand"):
        interpreter.after(f"vllm.lora.ops.triton_ops.{operation}_op", functools.partial(_whole, operation))
    for name in COMPILED:
        setattr(faked, name, kernel(getattr(faked, name)))
    faked.install(capability)
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle = CUDAGraph, Capture, lambda *_: (0, 0)
    import vllm.platforms as platforms
    from vllm.compilation import breakable_cudagraph, cudagraph_pool
    from vllm.utils import torch_utils

    platform: Any = type(platforms._current_platform)
    platform.opaque_attention_op = classmethod(lambda cls: False)
    platform.graph_pool_handle = classmethod(lambda cls: (0, 0))
    modules: tuple[ModuleType, ...] = (torch_utils, breakable_cudagraph)
    for module in modules:
        for name in ("weak_ref_tensor", "weak_ref_tensors"):
            setattr(module, name, lambda tensors: tensors)
    pool: Any = cudagraph_pool
    torch_utils._current_stream_tls.value = torch_utils._StreamPlaceholder()
    pool.set_graph_pool_id = lambda *_: None
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__
    # One record a launch: the interpreter runs a kernel by operations of its own.
    GridExecutor.__call__ = lambda executor, *args, **kwargs: kernel(functools.partial(original, executor))(
        *args, **kwargs
    )
