"""Benchmarks: methods side by side, with plan, rounds, statistics and tables."""
