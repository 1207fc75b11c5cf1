"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""


def register() -> None:
    """Teach vLLM to translate our methods. Until one is asked for, nothing else changes."""
    from vllm_adaptive_tree.engine import patches

    patches.patch_create_engine_config()
    patches.patch_validate_spec_decode()
    patches.patch_connector_metrics()
