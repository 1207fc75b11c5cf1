"""Adapter to vLLM's Model Runner V2. No code here makes the host wait for a value of the device."""
