"""Triton kernels for sampling and acceptance rules, one launch each, for GPUs, where launches dominate the cost.

They give the same tokens as `rng.CounterRNG` and `acceptance` from the same keys, up to the rounding of sums.
Each file is named after the module it replaces.
"""

from vllm_adaptive_tree.kernels.rejection import FUSED_RULES
from vllm_adaptive_tree.kernels.sampling import FusedRNG
from vllm_adaptive_tree.kernels.traversal import TRAVERSAL_KINDS, TraversalInputs, traversal
from vllm_adaptive_tree.kernels.walk import walk

__all__ = ["FUSED_RULES", "TRAVERSAL_KINDS", "FusedRNG", "TraversalInputs", "traversal", "walk"]
