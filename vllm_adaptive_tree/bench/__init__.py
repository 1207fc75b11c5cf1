"""Measures methods side by side: what is run, when, and what the times say."""
