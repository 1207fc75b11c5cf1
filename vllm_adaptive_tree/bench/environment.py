"""Bundled models, and the environment in which a measurement's engines start."""

import os
from pathlib import Path

from vllm_adaptive_tree.version import pip_install

PACKAGE = Path(__file__).resolve().parents[1]
PAIR = PACKAGE / "demo_pair"
TARGET, DRAFT, HEAD = str(PAIR / "target"), str(PAIR / "draft"), str(PAIR / "head")
LATTICE = str(PAIR / "lattice_head")
SMOLLM2_HEAD = str(PAIR / "smollm2_head")
"""EAGLE-3 head of SmolLM2-135M-Instruct."""
ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # each engine has a process of its own already
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def set_environment(model: str, draft: str, *, enlarged: bool = False, cache: int | None = 1) -> None:
    """Set the variables that the user has not set; `cache`: GiB for K/V, None: as the engine's arguments say."""
    settings = dict(ENVIRONMENT)
    if cache is not None:
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(cache)
    if model == TARGET and not enlarged:
        settings["OMP_NUM_THREADS"] = "1"  # more threads slow a tiny model down
    if Path(model).is_dir() and Path(draft).is_dir():
        settings["HF_HUB_OFFLINE"] = "1"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def check_installed(model: str) -> None:
    """Raises ValueError if it is a bundled model that is not there: they are a distribution of their own."""
    if Path(model).parent == PAIR and not Path(model).is_dir():
        raise ValueError(
            f"the bundled pair is a package of its own and is not installed: {pip_install('demo')}, or name both models"
        )


def check_available(*models: str) -> None:
    """Raises ValueError if a hub name is neither in the hub's cache nor on the hub."""
    from vllm import envs

    from vllm_adaptive_tree.drafters import DRAFTERS
    from vllm_adaptive_tree.engine.checkpoint import why_absent

    for model in models:
        if model in DRAFTERS or envs.VLLM_USE_MODELSCOPE:
            continue
        reason = why_absent(model)
        if reason is not None:
            raise ValueError(f"{model!r} is no folder here and not in the hub's cache; asking {reason}")


def shown(model: str) -> str:
    """Path of a model: of a bundled one inside the package, of any other as given."""
    return Path(model).relative_to(PACKAGE).as_posix() if Path(model).is_relative_to(PACKAGE) else model
