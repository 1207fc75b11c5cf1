"""Model Runner V2 on a CPU, its kernels in Triton's interpreter, for tests alone.

vLLM's CPU build says it has no Triton, and its CPU platform switches asynchronous scheduling off.
"""

import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).parent


@cache  # once in a process
def install(runner: str) -> None:
    """Install the interpreter; must run before vLLM or Triton is imported.

    Args:
        runner: "v2"; "v2-async": with asynchronous scheduling; "v2-kernels": with a GPU's kernels and cache in place of
            the PyTorch operations for a CPU.
    """
    assert runner in ("v2", "v2-async", "v2-kernels")
    assert not {"vllm", "triton"} & set(sys.modules)
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    after("vllm.triton_utils.importing", lambda module: setattr(module, "HAS_TRITON", True))
    # The one kernel that the interpreter cannot run; PyTorch's operations stand beside it.
    after("vllm.v1.sample.ops.topk_topp_sampler", lambda module: setattr(module, "HAS_TRITON", False))
    after("triton.runtime.interpreter", _splat_truth_values)
    after("triton.runtime.interpreter", _patch_once)
    after("triton.runtime.interpreter", _compute_in_bfloat16)
    after("triton.runtime.interpreter", _grid_of_arguments)
    # Nothing is in registers here, and each operation costs the same.
    after("vllm_adaptive_tree.kernels.growth", lambda found: setattr(found, "rivals_at_a_time", lambda padded: padded))
    if runner == "v2-async":
        after("vllm.platforms.cpu", _keep_asynchronous)
    if runner == "v2-kernels":
        after("vllm_adaptive_tree.engine.v2.device", lambda module: setattr(module, "compiles", lambda device: True))
        after("vllm.v1.attention.backends.cpu_attn", _plain_cache)


def install_in_children() -> None:
    """Let processes that this one starts, in which MODEL_RUNNER is the same, begin with `install`."""
    paths = os.environ.get("PYTHONPATH", ""), str(TESTS / "interpreted"), str(TESTS.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _splat_truth_values(module: ModuleType) -> None:
    """Fix masks: Triton 3.9 calls a scalar comparison of integers an integer, and then refuses it as a mask."""
    import triton.language as tl

    builder: Any = module.InterpreterBuilder  # type: ignore[attr-defined]
    original = builder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        truth = value.data.dtype == bool
        return original(self, shape, module.TensorHandle(value.data, tl.int1) if truth else value)

    builder.create_splat = create_splat


def _compute_in_bfloat16(module: ModuleType) -> None:
    """Fix arithmetic: Triton keeps bfloat16 as integers, and adds, multiplies and compares those."""
    import numpy as np
    import triton.language as tl

    builder: Any = module.InterpreterBuilder  # type: ignore[attr-defined]
    dot, binary = builder.create_dot, builder.binary_op

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            left, right = (self.create_fp_ext(one, tl.float32) for one in (left, right))
        return dot(self, left, right, *rest)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, operation)
        values = operation(*(self.create_fp_ext(one, tl.float32).data for one in (left, right)))
        if values.dtype == np.bool_:
            return module.TensorHandle(values, tl.int1)
        return self.create_fp_trunc(module.TensorHandle(values, tl.float32), tl.bfloat16)

    builder.create_dot, builder.binary_op = create_dot, binary_op


def _grid_of_arguments(module: ModuleType) -> None:
    """Give the function of a grid the arguments of the launch, as the compiler does; some ask a tensor for its size."""
    function: Any = module.InterpretedFunction
    original = function.run

    def run(self: Any, *args: Any, grid: Any, **given: Any) -> Any:
        if callable(grid):
            names = inspect.signature(self.fn).parameters
            inside = {name: value for name, value in given.items() if name in names}
            grid = grid(inspect.getcallargs(self.fn, *args, **inside))
        return original(self, *args, grid=grid, **given)

    function.run = run


def _patch_once(module: ModuleType) -> None:
    """Patch `triton.language` once per launch. Every call of a jitted function inside would do so again: half of the
    time of a kernel with many."""
    original: Any = module._patch_lang
    patched: set[int] = set()

    def patch(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return module._LangPatchScope()  # type: ignore[attr-defined]
        scope = original(function)
        if not patched:
            restore = scope.restore

            def restored() -> None:
                patched.clear()
                restore()

            scope.restore = restored
        patched.add(id(function.__globals__))
        return scope

    module._patch_lang = patch  # type: ignore[attr-defined]


def _keep_asynchronous(module: ModuleType) -> None:
    platform: Any = module.CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = asked

    platform.check_and_update_config = classmethod(check_and_update_config)


def _plain_cache(module: ModuleType) -> None:
    from tests.plain_cache import PlainAttention

    implementation: Any = module.CPUAttentionBackendImpl
    implementation.forward = PlainAttention.forward
    implementation.do_kv_cache_update = PlainAttention.do_kv_cache_update


def after(name: str, change: Callable[[ModuleType], None]) -> None:
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]):
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
