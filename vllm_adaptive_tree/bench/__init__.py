"""Benchmarks of methods side by side, with plan, rounds, statistics and tables."""
