"""Set-up of all tests: a cache folder for vLLM of their own, so that no profile from elsewhere counts.

Only vLLM's records of its model classes are kept: each takes it a process of ten seconds.
"""

import os
import tempfile
from pathlib import Path

import pytest

from tests.extended import EXTENDED

TESTS = Path(__file__).parent
USERS = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm")) / "modelinfos"
CACHE = tempfile.TemporaryDirectory(prefix="vllm-cache-", ignore_cleanup_errors=True)
os.environ["VLLM_CACHE_ROOT"] = CACHE.name
USERS.mkdir(parents=True, exist_ok=True)
(Path(CACHE.name) / "modelinfos").symlink_to(USERS, target_is_directory=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rows that CI leaves out. Other runners and releases have other rows; here each part must name one."""
    names: dict[str, list[pytest.Item]] = {}
    for item in items:
        names.setdefault(item.path.relative_to(TESTS).as_posix(), []).append(item)
    whole = not any("::" in argument for argument in config.args) and not {"MODEL_RUNNER", "TESTED_VLLM"} & {
        *os.environ
    }
    for file in names.keys() & EXTENDED.keys():
        for part in EXTENDED[file]:
            rows = [item for item in names[file] if part in item.name]
            if whole and not rows:
                raise pytest.UsageError(f"tests/extended.py: {file} has no row {part!r}")
            for item in rows:
                item.add_marker(pytest.mark.slow)
