"""Version of this package, and how it is installed."""

__version__ = "0.2.0.dev0"


def pip_install(extra: str) -> str:
    """Command for messages. No index has a release yet, so its wheels are those of a checkout: `make wheels`."""
    return f"pip install --find-links dist 'vllm-adaptive-tree[{extra}]'"
