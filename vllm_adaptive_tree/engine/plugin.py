"""Entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

import logging

logger = logging.getLogger(f"vllm.{__name__}")  # an unknown release may have no `init_logger`


def register() -> None:
    """Let vLLM recognise our methods: one wrapped function. Nothing else changes until a method is asked for.

    Never raises: vLLM catches nothing here, and this runs for users who have not asked for us. Outside the supported
    window nothing of vLLM is imported beyond its version.
    """
    version = "unknown"
    try:
        import vllm

        from vllm_adaptive_tree.engine import recognition
        from vllm_adaptive_tree.versions import is_supported, window

        version = vllm.__version__
        if is_supported(version):
            recognition.patch_create_engine_config()
        else:
            logger.info("vllm-adaptive-tree supports vLLM %s; in vLLM %s it does nothing", window(), version)
            recognition.refuse_tree_methods()
    except Exception as error:
        logger.warning("vllm-adaptive-tree does nothing in this vLLM %s: %s", version, error)
