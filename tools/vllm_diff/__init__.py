"""What a vLLM release has moved or changed of what we use, told by reading: nothing of vLLM is imported or run."""
