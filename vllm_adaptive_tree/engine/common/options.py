"""Our options, read back in an engine process."""

from typing import Any

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.names import CONFIG_KEY


def tree_options(vllm_config: Any) -> TreeOptions:
    return TreeOptions.from_json(vllm_config.additional_config[CONFIG_KEY])
