"""Attention of the target's layers: their metadata in a verification, and blocks for the branches of trees."""

from collections.abc import Iterator
from typing import Any

from vllm_adaptive_tree.engine.v1 import scratch
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks
from vllm_adaptive_tree.engine.v1.verification import Verification


class TargetAttention:
    def __init__(self, runner: Any):
        self.runner, self.scratch = runner, ScratchBlocks(0)

    def extended(self, kv_cache_config: Any) -> Any:
        """vLLM's KVCacheConfig with room for the branches."""
        if self.runner.pair.chains:
            return kv_cache_config
        longest = self.runner.num_spec_tokens // self.runner.cache_config.block_size + 1  # blocks of a branch
        self.scratch = ScratchBlocks(scratch.COUNT + longest)
        return self.scratch.extended(kv_cache_config)

    def begin_cache(self) -> None:
        """Prepare for the KV cache, which now exists."""
        if not self.scratch.count:
            return
        layers = self.runner.compilation_config.static_forward_context
        self.scratch.begin_cache({name: layers[name].kv_cache for _, names in self.groups() for name in names})

    def groups(self) -> Iterator[tuple[Any, list[str]]]:
        """vLLM's attention groups that hold layers of the target, and those layers."""
        drafts = self.runner.drafter.layers
        for group in (group for groups in self.runner.attn_groups for group in groups):
            layers = [name for name in group.layer_names if name not in drafts]
            if layers:
                yield group, layers

    def add_trees(self, metadata: dict[str, Any], verification: Verification | None) -> None:
        """Replace vLLM's `metadata` of these layers, unless no tree branches."""
        if verification is None or not verification.branching:
            return
        for group, layers in self.groups():
            trees = verification.metadata(group.get_metadata_builder(0), layers, metadata[layers[0]], self.scratch)
            metadata.update(dict.fromkeys(layers, trees))
