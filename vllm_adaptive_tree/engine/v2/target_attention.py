"""Attention of the target's layers: their metadata in a verification, and the K/V of accepted nodes."""

from typing import Any

import numpy as np
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode

from vllm_adaptive_tree.engine.targets import checks, latents
from vllm_adaptive_tree.engine.v2 import verification
from vllm_adaptive_tree.engine.v2.attention import DenseTrees, without_first
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.latent_batch import LatentBuilder, latent_builders
from vllm_adaptive_tree.engine.v2.target_buffers import TargetBuffers
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels.layout import Layout


class TargetAttention:
    """Takes the place of `prepare_attn` of a `runner`'s model state."""

    def __init__(self, runner: Any):
        """Runs once the models are loaded, before vLLM sizes its cache."""
        self.runner, self.native_metadata = runner, runner.model_state.prepare_attn
        nodes = runner.options.num_speculative_tokens
        self.in_generation_order = nodes <= verification.IN_GENERATION_ORDER
        layers, drafts = checks.attention_layers(runner.vllm_config), runner.speculator.draft_attn_layer_names
        self.layers = {name: layer for name, layer in layers.items() if name not in drafts}
        """The target's; those with a recurrent state read chains as vLLM's own."""
        self.buffers: TargetBuffers | None = None  # where kernels run
        if compiles(runner.device):
            sizes = runner.max_num_reqs, runner.max_num_tokens, nodes
            self.buffers = TargetBuffers(self.layers, *sizes, runner.model_config.dtype, runner.device)
        self.off = False
        """True once every step is vLLM's own."""
        self.metadata: dict[str, Any] = {}
        self.latent: dict[str, LatentBuilder] = {}
        """Builders of metadata of the latent layers."""
        self.slots: dict[str, Tensor] = {}
        """Metadata, and slots of all rows, of each layer in the last verification."""
        runner.model_state.prepare_attn = self.prepare

    @property
    def layout(self) -> Layout | None:
        """Buffers in which trees are laid out in one launch, if they can be."""
        return self.buffers.layout if self.buffers is not None and self.in_generation_order else None

    def open_caches(self) -> None:
        """Runs once the caches are there. Raises ValueError for one that cannot be read."""
        runner = self.runner
        layers = checks.attention_layers(runner.vllm_config)
        latents.check_block_sizes(layers, runner.kv_cache_config.kv_cache_groups)
        self.latent = latent_builders(runner.attn_groups, layers)
        if self.buffers is not None:
            groups = enumerate(runner.kv_cache_config.kv_cache_groups)
            self.buffers.open_caches({name: number for number, group in groups for name in group.layer_names})
        elif runner.device.type == "cpu":
            checks.check_packing(layers)

    def prepare(
        self, input_batch: Any, mode: Any, block_tables: Any, slot_mappings: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        """Build vLLM's metadata, and that of the trees for the target's layers."""
        # A whole graph holds our kernel, also for a step without a tree; vLLM records it under another name.
        recorded = kwargs.get("for_capture", False)
        whole = mode == CUDAGraphMode.FULL or recorded
        step = self.runner.step.verification
        trees = not self.off and (whole or (step is not None and step.reads_only_roots(input_batch)))
        for builder in self.latent.values():
            builder.waits = trees
        metadata = self.native_metadata(input_batch, mode, block_tables, slot_mappings, *rest, **kwargs)
        if not trees:
            return metadata
        runner = self.runner
        row_start, count, rows = (
            input_batch.query_start_loc,
            input_batch.num_reqs_after_padding,
            len(input_batch.positions),
        )
        requests = input_batch.num_reqs
        if not whole:
            assert step is not None
            requests = count = int(np.count_nonzero(step.scheduled))
            rows = count + input_batch.num_draft_tokens
        if self.buffers is not None:
            if step is None and not self.in_generation_order:
                self.buffers.layout.roots(input_batch.seq_lens[:requests], rows)
            elif step is not None and not self.in_generation_order:
                step.write_mask(self.buffers.layout, row_start, requests, rows)
            self.buffers.plan(row_start, count)
        others: dict[int, tuple[Any, Tensor]] = {}
        dense: dict[int, DenseTrees] = {}
        for group, slots in zip(runner.kv_cache_config.kv_cache_groups, slot_mappings, strict=True):
            for name in group.layer_names:
                drafts = name not in self.layers
                if drafts and (name not in self.latent or recorded):
                    continue
                if not drafts and whole and not recorded:
                    continue  # a replay reads the buffers alone
                if drafts and step is None:
                    metadata[name] = self.latent[name].whole()
                    continue
                if drafts and whole and runner.speculator.at_once(input_batch):
                    continue  # it reads in a graph of its own
                native = metadata[name]
                if id(native) not in others:
                    others[id(native)] = self._others(name, native, count, rows)
                rest, block_table = others[id(native)]
                if drafts:
                    assert step is not None
                    context = self.buffers.layout.context if self.buffers is not None else step.root.int()
                    metadata[name] = runner.speculator.chains(input_batch, context[:count], rest, block_table, rows)
                    continue
                if self.buffers is not None:
                    metadata[name] = self.buffers.metadata(name, rest, block_table, row_start, rows)
                    continue
                assert step is not None
                if id(native) not in dense:
                    longest = int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].max())
                    dense[id(native)] = step.dense(rest, block_table, group.kv_cache_spec.block_size, longest)
                metadata[name], self.slots[name] = dense[id(native)], slots
        self.metadata = metadata
        return metadata

    def _others(self, name: str, native: Any, count: int, rows: int) -> tuple[Any, Tensor]:
        """Of one group's `native` metadata what is left to the backend, and the block table [Q, B] of trees: those of
        the first `count` requests and `rows` rows. A CPU's backend reads all rows but those of latent layers."""
        if (builder := self.latent.get(name)) is not None:
            return builder.others(count, rows), builder.block_table[:count]
        table = native.block_table
        if self.buffers is None:
            return native, table
        return None if count == len(table) else without_first(native, count), table[:count]

    def commit(self, step: Verification, nodes: Tensor) -> None:
        """Copy the K/V of the accepted `nodes` [R, L] (-1 pads) to the slots after the root."""
        runner = self.runner
        if self.buffers is not None:
            self.buffers.commit(runner.block_tables.input_block_tables, step.root, nodes)
        else:
            step.commit(nodes, self.metadata, runner.compilation_config.static_forward_context, self.slots)
