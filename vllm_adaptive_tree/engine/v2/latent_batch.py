"""Batches of latent layers, whose backends in vLLM part them by lengths on the host: trees first, then the others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.engine.common.attention import TreeMetadata
from vllm_adaptive_tree.engine.targets.latents import is_latent
from vllm_adaptive_tree.engine.v2.attention import DenseTrees, KernelTrees, packed_bits


class Others(NamedTuple):
    """The requests of a batch that have no trees: they come after those that have."""

    metadata: Any  # vLLM's
    first: int  # row of the flat batch


class Chains(NamedTuple):
    """Rows of R requests that a draft of latents reads. vLLM's latent backends part a batch by lengths on the host, and
    those of accepted tokens are known to the device alone."""

    row_start: Tensor  # [R + 1] int32
    context: Tensor  # [R] int32: tokens of each before its rows
    block_table: Tensor  # [R, B]
    rows: int  # of the requests, at most, and of padding
    most: int  # rows of a request
    longest: int  # tokens of a request, at most

    def metadata(self, others: Others | None, block_size: int, plan: AttentionPlan | None) -> TreeMetadata:
        """`others`: after these rows; `plan`: of kernels, with which this package reads; None: without any."""
        place = torch.arange(self.most, device=self.context.device)
        if plan is None:
            return self._dense(others, block_size, place)
        parent = (place[1:] - 2).expand(len(self.context), -1)
        bits = packed_bits(parent, self.row_start, self.rows)
        plan.update(self.row_start, self.context)
        return KernelTrees(others, self.block_table, self.row_start, self.context, bits, self.rows, plan)

    def _dense(self, others: Others | None, block_size: int, place: Tensor) -> DenseTrees:
        count = self.row_start.diff()
        requests = count.nonzero()[:, 0]
        inside, mask = place < count[requests, None], place[:, None] >= place
        where = self.block_table[requests], self.row_start[requests].long(), inside, mask, self.context[requests]
        return DenseTrees.of(others, *where, block_size=block_size, longest=self.longest)


class LatentBuilder:
    """vLLM's builder of the metadata of latent layers, watched: it parts a batch by lengths on the host, and those of
    trees are known to the device alone."""

    def __init__(self, builder: Any):
        self.native: Callable[..., Any] = builder.build
        self.given: Any = None
        self.waits = False
        """True while a step with trees is prepared: what is left of its batch is built by `others`."""
        builder.build = self.build

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **more: Any) -> Any:
        self.given, self.more = common_attn_metadata, more
        return self if self.waits else self.native(common_prefix_len, common_attn_metadata, **more)

    def whole(self) -> Any:
        """vLLM's metadata of the last batch."""
        return self.native(0, self.given, **self.more)

    @property
    def block_table(self) -> Tensor:
        """[R, B], of the last batch."""
        table: Tensor = self.given.block_table_tensor
        return table

    def others(self, count: int, rows: int) -> Others | None:
        """Metadata of the last batch without its first `count` requests, which have so many `rows`; None: nobody is
        left."""
        given = self.given
        if count == given.num_reqs:
            return None
        starts = given.query_start_loc_cpu[count:] - given.query_start_loc_cpu[count]
        of_requests = {
            name: value[count:]
            for name in ("seq_lens", "seq_lens_cpu_upper_bound", "block_table_tensor", "is_prefilling", "req_idx")
            if (value := getattr(given, name, None)) is not None
        }
        rest = replace(
            given,
            query_start_loc=given.query_start_loc[count:] - rows,
            query_start_loc_cpu=starts,
            num_reqs=given.num_reqs - count,
            num_actual_tokens=given.num_actual_tokens - rows,
            max_query_len=int(np.diff(starts).max()),
            slot_mapping=given.slot_mapping[rows:],
            positions=None if given.positions is None else given.positions[rows:],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
            **of_requests,
        )
        return Others(self.native(0, rest, **self.more), rows)


def latent_builders(groups: Iterable[Iterable[Any]], layers: Mapping[str, Any]) -> dict[str, LatentBuilder]:
    """Builders of the latent ones among `layers`, by name. `groups`: vLLM's attention groups of each cache group."""
    found = dict[str, LatentBuilder]()
    for group in chain.from_iterable(groups):
        names = [name for name in group.layer_names if name in layers and is_latent(layers[name])]
        if names:
            found |= dict.fromkeys(names, LatentBuilder(group.get_metadata_builder()))
    return found
