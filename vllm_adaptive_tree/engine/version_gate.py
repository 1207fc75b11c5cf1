"""Which vLLM this release was built against."""

import vllm

SUPPORTED = "0.32"
"""The supported window: every 0.32.x."""


def require_supported_vllm() -> None:
    """Raise RuntimeError, with the version to install, outside the supported window."""
    if vllm.__version__.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise RuntimeError(
            f"vllm-adaptive-tree supports vLLM {SUPPORTED}.*, and this is vLLM {vllm.__version__}. Install "
            f"'vllm-adaptive-tree[cuda]' or 'vllm-adaptive-tree[cpu]' for a matching one, or remove the tree method "
            "from speculative_config."
        )
