"""EAGLE-3 and one-forward heads for small targets: modules, their training, and vLLM's checkpoint formats."""
