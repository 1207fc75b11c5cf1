"""The names of release 0.1 for what is now in `rng.py`; kept for one release."""

from vllm_adaptive_tree.rng import CounterRNG as KeyedNoise
from vllm_adaptive_tree.rng import RandomSource as Noise

__all__ = ["KeyedNoise", "Noise"]
