"""Draft trees: on the host, as batched tensors, as shapes without tokens, and their attention masks."""

from vllm_adaptive_tree.trees.masks import SlicedMask
from vllm_adaptive_tree.trees.shape import Shape
from vllm_adaptive_tree.trees.token_tree import TokenTree
from vllm_adaptive_tree.trees.tree_batch import TreeBatch

__all__ = ["Shape", "SlicedMask", "TokenTree", "TreeBatch"]
