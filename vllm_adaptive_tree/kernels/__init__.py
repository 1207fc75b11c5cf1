"""Draws and rules in one launch each, for devices where starting an operation costs more than its work.

The same tokens as `rng.CounterRNG` and `acceptance` give from the same keys, but for the rounding of sums.
"""

from vllm_adaptive_tree.kernels.draws import FusedRNG
from vllm_adaptive_tree.kernels.leaves import KINDS, Tables, traversal
from vllm_adaptive_tree.kernels.siblings import FUSED
from vllm_adaptive_tree.kernels.walking import walk

__all__ = ["FUSED", "KINDS", "FusedRNG", "Tables", "traversal", "walk"]
