"""Start-up of a worker: rank checks, memory, and costs that are measured or read."""
