"""Adapter to vLLM's Model Runner V1, on a CPU: it walks requests on the host."""
