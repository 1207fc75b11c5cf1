"""Triton kernels around the forwards of the models, one launch each, for GPUs, where launches dominate the cost.

Those for sampling and acceptance rules give the same tokens as `rng.CounterRNG` and `acceptance` from the same keys, up
to the rounding of sums; each file is named after the module it replaces. `layout` and `commit` run before and after a
verification, `selection` before both, `paths` where the sampler reads history, `rules` at a node of `rejection_walk`;
`reading` before a draft, `accepted` before one that reads by vLLM's forward, `slots`, `growth` and `shape` in its
levels, `ngram` and `merging` after it, `waiting` where it rests.

What a kernel writes is a tensor of its own, or its address is not specialised: parts of one tensor are aligned for some
numbers of requests alone, and the kernel would be compiled again in service.
"""

from vllm_adaptive_tree.kernels.accepted import write_accepted
from vllm_adaptive_tree.kernels.commit import layer_addresses, move_accepted
from vllm_adaptive_tree.kernels.layout import Drafted, Layout
from vllm_adaptive_tree.kernels.paths import PathWindows, path_windows
from vllm_adaptive_tree.kernels.rejection_walk import RejectionInputs, rejection_walk
from vllm_adaptive_tree.kernels.rules import FUSED_RULES, REJECTION_RULES
from vllm_adaptive_tree.kernels.sampling import FusedRNG
from vllm_adaptive_tree.kernels.traversal import TRAVERSAL_KINDS, TraversalInputs, requests_at_once, traversal
from vllm_adaptive_tree.kernels.walk import walk

__all__ = [
    "FUSED_RULES",
    "REJECTION_RULES",
    "TRAVERSAL_KINDS",
    "Drafted",
    "FusedRNG",
    "Layout",
    "PathWindows",
    "RejectionInputs",
    "TraversalInputs",
    "layer_addresses",
    "move_accepted",
    "path_windows",
    "rejection_walk",
    "requests_at_once",
    "traversal",
    "walk",
    "write_accepted",
]
