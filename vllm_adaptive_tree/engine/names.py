"""Our names in vLLM's objects."""

CONFIG_KEY = "adaptive_tree"
"""Key of our options in vLLM's `additional_config`, which reaches every process and the compilation hash."""

MARK = "_adaptive_tree"
"""Attribute of a wrapped function (True), and of the SpeculativeConfig of a tree method (a `mark.Mark`)."""

STREAMS = "_adaptive_tree_streams"
"""Attribute of the ModelConfig of a tree method's target, where parsers get one token per delta: the server's default
sampling parameters."""
