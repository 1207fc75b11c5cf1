"""Memory of a draft on each rank: its weights, its K/V, and the buffers of the levels that it reads."""

from itertools import chain
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

MIB, GIB = 1 << 20, 1 << 30


class LevelBuffers(NamedTuple):
    """Most bytes: of a full batch whose trees have all levels, each with all the nodes that it may have."""

    feedback: int
    """Hidden states that a head passes from a node to its children: [R, S, H], S all slots that it has been given."""
    logits: int
    """[R, S, V] if a rule reads the draft's distribution, else those of one level at a time, [R, N, V] or fewer."""

    @classmethod
    def of(
        cls,
        *,
        requests: int,
        nodes: int,
        depth: int,
        vocabulary: int,
        size: int,
        hidden: int | None,
        kept: bool,
        rows: int | None = None,
        depths: int = 0,
    ) -> "LevelBuffers":
        """
        Args:
            requests: R, most trees of a batch.
            nodes: N, the node budget.
            depth: levels of a tree; the draft reads the root and all levels but the last.
            vocabulary: V.
            size: bytes of a number.
            hidden: H of a head, None for a draft that passes nothing on.
            kept: True if a rule reads the draft's distribution.
            rows: of a level of all requests; None: as many columns as nodes.
            depths: K of a head of one forward, whose logits [R, K, V] stay while a tree grows.
        """
        rows = requests * nodes if rows is None else rows
        slots = requests + rows * (min(depth, nodes) - 1)
        logits = (slots if kept else rows) + requests * depths
        return cls(slots * (hidden or 0) * size, logits * vocabulary * size)


class DraftMemory(NamedTuple):
    weights: int
    """Bytes, without tensors shared with the target."""
    kv: int
    """Bytes per token."""
    levels: LevelBuffers
    profiled: bool = False
    """True if vLLM's memory profile has run the levels."""

    def within(self, available: int) -> int:
        """Bytes of `available` to keep free for the levels: half of it at most, since a batch is rarely full."""
        return min(sum(self.levels), available // 2)

    def describe(self, longest: int) -> str:
        """`longest`: tokens of a context, vLLM's `max_model_len`."""
        return (
            f"weights {format_bytes(self.weights)}, K/V {self.kv} bytes per token ({format_bytes(self.kv * longest)} "
            f"for a context of {longest}), level buffers up to {format_bytes(sum(self.levels))} (hidden states "
            f"{format_bytes(self.levels.feedback)}, logits {format_bytes(self.levels.logits)})"
        )


def own_weights(draft: nn.Module | None, target: nn.Module) -> int:
    """Bytes of the parameters and buffers that a draft does not share with the target."""
    if draft is None:
        return 0
    shared, modules = _storages(target), set(target.modules())
    unshared = sum(size for place, size in _storages(draft).items() if place not in shared)
    return unshared + sum(_packed(module) for module in draft.modules() if module not in modules)


def _storages(model: nn.Module) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in chain(model.parameters(), model.buffers()))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _packed(module: nn.Module) -> int:
    """Bytes of a linear layer's weight that vLLM's CPU build has packed elsewhere, leaving an empty one."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.numel():
        return 0
    sizes = (
        getattr(module, f"{end}_size_per_partition", getattr(module, f"{end}_size", 0)) for end in ("input", "output")
    )
    return prod(sizes) * weight.element_size()


def format_bytes(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
