"""What a tree is: one tree on the host, a batch of trees on a device."""

from vllm_adaptive_tree.trees.token_tree import TokenTree
from vllm_adaptive_tree.trees.tree_batch import TreeBatch

__all__ = ["TokenTree", "TreeBatch"]
