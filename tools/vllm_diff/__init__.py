"""Comparison of the parts of vLLM that we use between releases, by reading sources: nothing of vLLM is imported or
run."""
