"""Cost profile: a file that carries the measured and learnt numbers of `budget: "auto"` from process to process."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.version import __version__

FORMAT = 6
FIRST, EVERY = 10.0, 180.0
"""Seconds of decoding until the first write, and most seconds between two; intervals double. vLLM's server kills its
workers when it is stopped, unless `--shutdown-timeout` leaves them time, and loses what came after the last
write."""
OURS = b'{"key": ', b'{"name": '
"""First bytes of a profile, and of a file of `vllm-adaptive-tree costs`."""
LABELS = "name", "step"
"""Fields that `bench --project` reads of a file of `vllm-adaptive-tree costs`; a profile in its place keeps them."""
LARGEST = 1 << 22
"""Most bytes of a file that is read; a profile has far fewer."""
WEIGHTS = "*.safetensors", "*.bin", "*.pt"
LEARNT = "gate", "vector"
"""Options that name a file, whose content is part of the key."""

logger = init_logger(f"vllm.{__name__}")


def check_folder(file: str | None) -> None:
    """Raises ValueError if the file that `cost_profile` names could not be written later, or is something else."""
    if file in (None, "auto"):
        return
    try:
        path = Path(file).expanduser()
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not path.is_file():
            raise OSError("it is no file")
        if path.exists() and not _is_ours(path):
            raise OSError("it exists and is no cost profile, so it is not replaced")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise ValueError(
            f"speculative_config['tree']['cost_profile']: {file!r} cannot be written "
            f"({getattr(error, 'strerror', None) or error}); name another file in a folder that exists and may be "
            "written, 'auto' for one in vLLM's cache folder, or null for none"
        ) from error


def _is_ours(path: Path) -> bool:
    """Return whether the file begins as a profile does; an empty or truncated one counts."""
    with path.open("rb") as opened:
        begins = opened.read(max(map(len, OURS)))
    return any(begins.startswith(ours[: len(begins)]) for ours in OURS)


def key_of(config: Any, options: TreeOptions) -> dict[str, Any]:
    """Key of a profile: all that its numbers depend on (models, machine, method, versions). `config` is vLLM's."""
    given = asdict(options)
    given["tree"] = {name: value for name, value in given["tree"].items() if name != "cost_profile"}
    parallel, compilation = config.parallel_config, config.compilation_config
    key = {
        "versions": [FORMAT, __version__, vllm.__version__, torch.__version__],
        "target": _identity(config.model_config),
        "draft": _identity(config.speculative_config.draft_model_config),
        "options": given,
        "learnt from": {name: digest(value) for name, value in given["tree"].items() if name in LEARNT},
        "machine": [_processor(), current_platform.device_type, current_platform.get_device_name()],
        "threads": torch.get_num_threads(),
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "model runner": "V2" if config.use_v2_model_runner else "V1",
        "eager": config.model_config.enforce_eager,
        "compilation": [str(compilation.mode), str(compilation.cudagraph_mode), compilation.cudagraph_capture_sizes],
        "cache": [str(config.cache_config.cache_dtype), config.cache_config.block_size],
        "rows": config.scheduler_config.max_num_batched_tokens,
    }
    plain: dict[str, Any] = json.loads(json.dumps(key, default=str))
    return plain


def _identity(model: Any) -> list[Any]:
    """Identity of a model: its path, its configuration, and for a folder its weights as they are now."""
    folder = Path(model.model)
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)) if folder.is_dir() else []
    weights = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    config = {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}
    hashed = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return [str(model.model), model.revision, hashed, str(model.dtype), str(model.quantization), weights]


def digest(file: str | None) -> str | None:
    """SHA-256 of a file's content."""
    return None if file is None else hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "CPU part"))), "unknown"
    )


class CostProfile:
    """One profile file. A bad file does not keep the engine from starting, nor a later fault of it from running."""

    def __init__(self, path: Path, key: Mapping[str, Any]):
        self.path, self.key = path, dict(key)
        self.collect: Callable[[], dict[str, Any]] | None = None
        """Returns the content to write; None until there is some."""
        self.labels: dict[str, Any] = {}
        self.pause = FIRST
        self.due: float | None = None
        self.warned = False

    @classmethod
    def of(cls, file: str, key: Mapping[str, Any]) -> "CostProfile | None":
        """Profile that `cost_profile` asks for; None if vLLM's cache folder cannot be written. Raises ValueError if a
        named file cannot be."""
        check_folder(file)
        if file != "auto":
            return cls(Path(file).expanduser(), key)
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = Path(envs.VLLM_CACHE_ROOT) / "adaptive_tree" / f"{name}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("%s cannot be created (%s): what the tree budget learns is not saved", path.parent, error)
            return None
        return cls(path, key)

    def read(self) -> dict[str, Any] | None:
        """Content written by an engine of the same key, or costs alone, without a key; None where there is neither."""
        try:
            if not self.path.exists():
                return None
            if not self.path.is_file() or self.path.stat().st_size > LARGEST:
                raise ValueError("it is no profile")
            data = json.loads(self.path.read_text())
            if not isinstance(data, dict) or "costs" not in data or ("key" in data) != ("learnt" in data):
                raise ValueError("it is no profile")
            if data.get("key", self.key) != self.key:
                raise ValueError("it belongs to another pair, machine, method or version")
            self.labels = {label: data[label] for label in LABELS if label in data}
        except (OSError, ValueError, RecursionError) as error:
            self.reject(error)
            return None
        return data

    def reject(self, error: Exception) -> None:
        logger.warning("cost_profile %s is ignored and replaced: %s", self.path, error)

    def tick(self) -> None:
        """Write the file if it is time; called after every step."""
        now = time.monotonic()
        if self.due is None:
            self.due = now + self.pause
        elif now >= self.due:
            self.write()
            self.pause = min(2 * self.pause, EVERY)
            self.due = now + self.pause

    def write(self) -> None:
        if self.collect is None:
            return
        try:
            atomic_write(self.path, (json.dumps({"key": self.key, **self.labels, **self.collect()}) + "\n").encode())
        except OSError as error:
            if not self.warned:
                logger.warning("cost_profile %s could not be written (%s); decoding goes on", self.path, error)
            self.warned = True
