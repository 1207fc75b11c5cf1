"""Loops compiled for a CPU, once for each version of this package and kept in vLLM's cache folder.

numba is wherever vLLM is; without vLLM no step waits for these loops, and they run as they are written.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.version import source_digest

try:
    import numba
    from llvmlite.binding import ffi
except ImportError:
    numba = None
else:
    # A vLLM engine in this process reads `__dict__` of every object in every module. LLVM's library answers any
    # attribute with a function, so it gets a real `__dict__`. See `patches/README.md`.
    getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def njit(*signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's `njit`, with a cache of its own: numba's would not see that a function in another file has changed."""
    if numba is None:
        return lambda function: function
    folder = _cache()
    if folder is None:
        return numba.njit(*signature, **options)

    def compiled(function: Callable[..., Any]) -> Any:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            return numba.njit(*signature, cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = before

    return compiled


@cache
def _cache() -> Path | None:
    """Folder for this source; None: nothing can be kept there."""
    root = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    folder = root / "adaptive_tree_compiled" / source_digest()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    return None
