"""By which names this project is known inside vLLM's objects."""

CONFIG_KEY = "adaptive_tree"
"""Where our options travel in vLLM's `additional_config`: to every process, and into the compilation hash."""

MARK = "_adaptive_tree"
"""On a wrapped function: it is ours. On a SpeculativeConfig: a `mark.Mark`, it came from a tree method."""
