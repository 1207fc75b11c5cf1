"""Exact checks for authors of rules and proposers; this project's own tests use the same.

The models are random and tiny, so all trees, all cuts of the scheduler and all random decisions are enumerated. Nothing
is sampled: a check that passes is no matter of luck.
"""

from vllm_adaptive_tree.testing.lossless import assert_lossless
from vllm_adaptive_tree.testing.well_formed import assert_well_formed

__all__ = ["assert_lossless", "assert_well_formed"]
