"""Names of ours inside vLLM's objects."""

CONFIG_KEY = "adaptive_tree"
"""The key of our options in vLLM's `additional_config`, which reaches every process and the compilation hash."""

MARK = "_adaptive_tree"
"""The attribute of a wrapped function (True), and of the SpeculativeConfig of a tree method (a `mark.Mark`)."""
