"""Random numbers of `vllm_adaptive_tree.rng.CounterRNG` inside a kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """uint64 -> uint64, as `vllm_adaptive_tree.rng._mix`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(key, number):
    """Uniform number `number` of the int64 `key`: float64 in [0, 1)."""
    return (mix((key + number).to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53
