"""Our names in vLLM's objects, and in the environment."""

import os

CONFIG_KEY = "adaptive_tree"
"""Key of our options in vLLM's `additional_config`, which reaches every process and the compilation hash."""

MARK = "_adaptive_tree"
"""Attribute of a wrapped function (True), and of the SpeculativeConfig of a tree method (a `mark.Mark`)."""

DRAFTS = "_adaptive_tree_drafts"
"""Attribute of a ModelRunnerOutput, and of the scheduler that has read it: the next step's draft tokens."""

LOADED = "_adaptive_tree_loaded"
"""Attribute of a NewRequestData: its computed tokens that a KV connector may have brought."""

STREAMS = "_adaptive_tree_streams"
"""Attribute of the ModelConfig of a tree method's target, where parsers get one token per delta: the server's default
sampling parameters."""


def setting(variable: str) -> str:
    """Value of an environment variable, "" if unset; also under a name with vLLM's prefix, which Ray copies to its
    workers and of which vLLM warns."""
    return os.environ.get(variable) or os.environ.get(f"VLLM_{variable}", "")
