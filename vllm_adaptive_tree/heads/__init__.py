"""EAGLE-3 heads for small targets: the module, its training, and vLLM's checkpoint format."""
