"""Start-up check on a GPU: docs/gpu.md."""
