"""Certificate of a passed check: a file in ~/.cache/vllm_adaptive_tree, so that later starts check less.

Its name is the digest of everything that a verdict depends on: devices, driver, versions, the sources of this package,
models, options and ranks.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_adaptive_tree.engine.common.ranks import object_from_rank_0, objects_of_all
from vllm_adaptive_tree.engine.installation import NODE, here
from vllm_adaptive_tree.engine.self_check.verdict import Verdict
from vllm_adaptive_tree.files import atomic_write, cache_folder

logger = init_logger(f"vllm.{__name__}")


class Certificate:
    """Certificate of one engine; every rank makes one, rank 0 reads and writes."""

    def __init__(self, runner: Any):
        self.key: list[dict[str, Any]] = objects_of_all(_rank(runner))
        """Key of each rank."""

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return cache_folder() / f"{digest[:32]}.json"

    def exists(self) -> bool:
        """Return whether the certificate is there; the same on every rank."""
        try:
            valid = json.loads(self.file.read_text())["key"] == self.key
        except (OSError, ValueError, KeyError, TypeError):
            valid = False
        return bool(object_from_rank_0(valid))

    def write(self, verdict: Verdict) -> None:
        """Write the certificate. A folder that cannot be written costs the next start a few seconds."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.file, (json.dumps({"key": self.key, "findings": verdict.to_json()}) + "\n").encode())
        except OSError as error:
            logger.warning("The certificate of the tree self check cannot be written: %s", error)


def device() -> dict[str, Any]:
    """Versions of this process's devices, drivers and kernel compilers."""
    import triton  # type: ignore[import-untyped]

    versions: dict[str, Any] = {"triton": triton.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        versions |= {"device": torch.cuda.get_device_name(), "capability": list(capability)}
        versions["driver"] = _driver()
    return versions


def _driver() -> str:
    """Version of NVIDIA's driver, as `nvidia-smi` shows it; PyTorch has no public call for it."""
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:  # NVML is missing in some containers
        return f"unknown: {error}"


def _rank(runner: Any) -> dict[str, Any]:
    config = runner.vllm_config
    models = (config.model_config, config.speculative_config.draft_model_config)
    return {
        "installed": {name: version for name, version in here().items() if name != NODE},
        **device(),
        "models": [None if model is None else json.loads(model.hf_config.to_json_string()) for model in models],
        "dtype": str(runner.dtype),
        "options": runner.options.to_json(),
        "cache": [config.cache_config.block_size, config.cache_config.cache_dtype],
        "limits": [runner.max_model_len, runner.max_num_tokens, runner.max_num_reqs],
        "graphs": str(config.compilation_config.cudagraph_mode),
        "ranks": config.parallel_config.tensor_parallel_size,
    }
