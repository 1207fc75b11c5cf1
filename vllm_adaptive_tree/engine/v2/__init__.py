"""The adapter to vLLM's Model Runner V2. Nothing in here reads a value of the device on the host."""
