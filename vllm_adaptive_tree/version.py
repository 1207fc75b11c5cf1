"""Version of this package, and how it is installed."""

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.2.0.dev0"


def pip_install(extra: str) -> str:
    """Command for messages. No index has a release yet, so its wheels are those of a checkout: `make wheels`."""
    return f"pip install --find-links dist 'vllm-adaptive-tree[{extra}]'"


@cache
def source_digest() -> str:
    """Digest of this package's files: a checkout keeps its version from commit to commit."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())
    return digest.hexdigest()[:8]
