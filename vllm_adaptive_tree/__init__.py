"""Tree speculative decoding for stock vLLM: the draft tree follows the draft model's own probabilities."""

from vllm_adaptive_tree.acceptance import register_acceptance
from vllm_adaptive_tree.proposers import register_proposer
from vllm_adaptive_tree.trees import TokenTree
from vllm_adaptive_tree.version import __version__

__all__ = ["TokenTree", "__version__", "register_acceptance", "register_proposer"]
