"""Loops compiled for a CPU."""

from llvmlite.binding import ffi
from numba import njit

# A vLLM engine in this process reads `__dict__` of every object in every module. LLVM's library answers any attribute
# with a function, so it gets a real `__dict__`. See `patches/README.md`.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})

__all__ = ["njit"]
