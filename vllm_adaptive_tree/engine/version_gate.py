"""Outside the supported window a tree method is refused."""

import vllm

from vllm_adaptive_tree.versions import is_supported, window


def require_supported_vllm() -> None:
    """Raise RuntimeError, with the version to install, outside the supported window."""
    if not is_supported(vllm.__version__):
        raise RuntimeError(
            f"vllm-adaptive-tree supports vLLM {window()}, and this is vLLM {vllm.__version__}. Install "
            f"'vllm-adaptive-tree[cuda]' or 'vllm-adaptive-tree[cpu]' for a matching one, or remove the tree method "
            "from speculative_config."
        )
