"""Check E: no tree step makes the host wait for the device.

On CUDA PyTorch reports where it synchronizes. On a CPU, where nothing waits, operations that would wait are counted;
only inside our own functions, since vLLM's attention there reads tensors of its own.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.v2 import drafting, trial
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.step import step

PACKAGE = str(Path(__file__).parents[2])
ASIDE = str(Path(__file__).parent), trial.__file__
"""What no step of a user runs."""
OURS = (
    (Verification, "write_rows"),
    (Verification, "write_path"),
    (Verification, "commit"),
    (step, "accept"),
    (drafting, "draft_tree"),
)
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten._unique2,
    aten.equal,
    aten.is_nonzero,
    aten.item,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_}


def finding(places: list[str]) -> Finding:
    figures: dict[str, Any] = {"waits": len(places)}
    return Finding("waits", not places, figures | ({"at": " ".join(sorted(set(places)))} if places else {}))


@contextmanager
def watched(device: torch.device) -> Iterator[list[str]]:
    """Places, file:line of this package, at which the host waits inside the block; complete at its end."""
    places: list[str] = []
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode("default")
        synchronizing = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        places += [f"{warning.filename}:{warning.lineno}" for warning in synchronizing if _counts(warning.filename)]
        return
    with ExitStack() as stack:
        for owner, name in OURS:
            stack.enter_context(swapped(owner, name, _guarded(getattr(owner, name), places)))
        yield places


def _counts(file: str) -> bool:
    return file.startswith(PACKAGE) and not file.startswith(ASIDE)


def _guarded(function: Any, places: list[str]) -> Any:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Watch(places):
            return function(*args, **kwargs)

    return run


class _Watch(TorchDispatchMode):
    def __init__(self, places: list[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        masks = packet in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if packet in WAITS or masks:
            frame: Any = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            if frame is not None and _counts(frame.f_code.co_filename):
                self.places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))
