"""numba's `njit` where numba is: it is wherever vLLM is, and without vLLM no step waits for these loops."""

from collections.abc import Callable
from typing import Any

try:
    from vllm_adaptive_tree.compiled import njit
except ImportError:

    def njit(*signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        return lambda function: function


__all__ = ["njit"]
