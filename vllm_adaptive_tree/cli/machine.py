"""Known causes of slow CPU decoding, detected here."""

import importlib.util
import os
from pathlib import Path

FEW = 4
"""Number of cores below which trees stay small."""
CPU_INFO = Path("/proc/cpuinfo")


def slowness() -> list[str]:
    """Causes on this machine; a machine with a CUDA device is not judged by its CPU."""
    flags = set[str]()
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text().splitlines()
        flags = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    loaded = os.environ.get("LD_PRELOAD", "")
    return findings(
        flags, cores=len(os.sched_getaffinity(0)), load=os.getloadavg()[0], compiled=_has("numba"), preloaded=loaded
    )


def findings(flags: set[str], *, cores: int, load: float, compiled: bool, preloaded: str) -> list[str]:
    """
    Args:
        flags: of the CPU; empty where they are not known.
        load: mean number of running processes in the last minute.
        compiled: True if numba is installed.
        preloaded: LD_PRELOAD.
    """
    found = []
    if flags and "avx512f" not in flags:
        found.append("the CPU has no AVX-512, which vLLM's kernels are made for")
    elif flags and not {"amx_bf16", "avx512_bf16"} & flags:
        found.append("the CPU computes bfloat16 in float32 (no AVX512_BF16, no AMX): bfloat16 saves memory, not time")
    if cores < FEW:
        found.append(f"{cores} cores: a verified node is extra work here, so the budget keeps trees small")
    if load > cores / 2:
        found.append(
            f"{load:.1f} processes run on {cores} cores: costs that an engine measures now are not those of a quiet "
            "machine; delete its cost profile afterwards"
        )
    if not compiled:
        found.append("numba is missing: trees grow in loops of Python; the extra 'cpu' brings it")
    if "tcmalloc" not in preloaded:
        found.append("tcmalloc is not preloaded (LD_PRELOAD), which vLLM recommends on CPUs")
    return found


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
