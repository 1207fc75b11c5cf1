"""Tree attention in vLLM's attention layers: their replaced implementation, and the metadata of a draft level."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.attention.cpu import attend, context_bias
from vllm_adaptive_tree.engine.common.contexts import Contexts, finite
from vllm_adaptive_tree.engine.cpu_cache import gather_context
from vllm_adaptive_tree.engine.targets import checks, latents
from vllm_adaptive_tree.trees import SlicedMask


class AttentionVariant(NamedTuple):
    """Sliding window, soft-cap and sinks of a layer, as `attention.reference` takes them."""

    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None

    @classmethod
    def of(cls, impl: Any) -> "AttentionVariant":
        """`impl`: of a vLLM layer, for CPUs or FlashAttention's, which counts the tokens before and after."""
        window = getattr(impl, "sliding_window", None)
        if isinstance(window, tuple):
            window = -1 if window[0] < 0 else window[0] + 1
        cap = getattr(impl, "logits_soft_cap", None)
        return cls(max(window or 0, 0), float(cap or 0.0), getattr(impl, "sinks", None))


class TreeMetadata:
    """Base of our attention metadata, which attends itself in place of the backend."""

    __slots__ = ()
    reads_rows: ClassVar[bool] = True
    """True if `attend` reads the keys and values that it is given; False: those in the cache."""
    num_decode_tokens: ClassVar[None] = None
    """vLLM's latent layers hand it on when they write their cache, for ranks that share a prompt."""

    def rows_of(self, rows: int) -> int:
        """Rows of trees, the first of so many `rows` of the batch."""
        return rows

    def before(self) -> Any:
        """vLLM's metadata of rows for which the backend attends first; None: there are none."""
        return None

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        """Attend, as `AttentionImpl.forward`; `impl` is the layer's, a `TreeAttention`."""
        raise NotImplementedError


class DraftKeys(TreeMetadata):
    """Metadata of a draft forward over one level: keys and values of the nodes read so far, then the context.

    Nodes never enter the paged cache; accepted tokens are read again when the draft catches up.
    """

    def __init__(self, contexts: Contexts, length: Tensor):
        """`length` [R]: tokens of each context, the root included, which is the last."""
        self.contexts, self.room = contexts, contexts.room
        self.context_bias = context_bias(length, contexts.width)  # [R, 1, width]
        # layer -> key, value [R, Hkv, room + width, D]; without the context if that does not stay
        self.scratch: dict[str, tuple[Tensor, Tensor]] = {}
        # [R, 1 + S, S]: root or node, its ancestors; the root has a row, which sees none, and no column
        self.seen = torch.zeros(len(length), 1, 0, dtype=torch.bool, device=length.device)
        self.bias = torch.empty(0)
        self.shape = torch.Size((len(length), 0))  # R, W of this level
        self.places: Tensor | None = None
        self.level = 1  # the level that comes next; the root is level 0
        self.sliced: SlicedMask | None = None  # of the shape that all trees have, while every level is read in full

    def open_level(self, parent: Tensor, places: Tensor | None = None) -> None:
        """Prepare the next forward: W new nodes a request below `parent` [R, W], counted as in `Frontier`.

        `places` [M] int64, increasing: r * W + w of the nodes that have a row in the forward; None: all.
        """
        requests, before, columns = self.seen.shape
        width = parent.shape[1]
        self.shape = parent.shape
        self.places = None if places is None or len(places) == parent.numel() else places
        if self.sliced is not None and self.sliced.ends[self.level] != before + width:
            self.sliced = None
        if self.sliced is not None:
            self.seen = self.sliced.upto(self.level)[:, 1:].expand(requests, -1, -1)
        else:
            itself = torch.eye(width, dtype=torch.bool, device=parent.device).expand(requests, width, width)
            above = self.seen.gather(1, parent[:, :, None].expand(requests, width, columns))
            self.seen = torch.cat([pad(self.seen, (0, width)), torch.cat([above, itself], 2)], 1)
        self.level += 1
        self._see(self.seen[:, before:])

    def open_block(self, width: int, *, causal: bool) -> None:
        """Prepare a forward over W rows a request after the context, all of which see each other, or those before them;
        there are no levels below."""
        block = torch.ones(width, width, dtype=torch.bool, device=self.seen.device)
        self.seen = (block.tril() if causal else block).expand(len(self.seen), width, width)
        self.shape, self.places = self.seen.shape[:2], None
        self._see(self.seen)

    def _see(self, seen: Tensor) -> None:
        """Set the bias of the next forward. `seen` [R, W, S]: nodes that each row sees, beside its context."""
        width, nodes = seen.shape[1:]
        if nodes > self.room:
            self._widen(2 * nodes)
        tree = torch.where(pad(seen, (0, self.room - nodes)), 0.0, -torch.inf)
        self.bias = torch.cat([tree, self.context_bias.expand(-1, width, -1)], 2)  # [R, W, room + width]

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        keys, values = self.read(layer, kv_cache, key, value)
        attended = attend(self.pad(query), keys, values, self.bias, impl.scale).flatten(0, 1)
        return out.copy_(attended if self.places is None else attended.index_select(0, self.places))

    def pad(self, rows: Tensor) -> Tensor:
        """[M, ..] -> [R, W, ..]; nodes without a row get zeros."""
        if self.places is not None:
            rows = rows.new_zeros(self.shape.numel(), *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.unflatten(0, self.shape)

    def read(self, layer: Any, kv_cache: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = self.seen.shape[2]
        start = end - self.shape[1]
        opened = kept = self.scratch.get(layer.layer_name)
        if opened is None or not self.contexts.stay:
            opened = self.contexts.open(layer, kv_cache)
        if kept is not None and kept is not opened:
            for whole, nodes in zip(opened, kept, strict=True):
                whole[:, :, :start] = nodes[:, :, :start]
        for whole, new in zip(opened, (key, value), strict=True):
            whole[:, :, start:end] = finite(self.pad(new).transpose(1, 2))
        if self.contexts.stay:
            self.scratch[layer.layer_name] = opened
        else:
            self.scratch[layer.layer_name] = opened[0][:, :, : self.room].clone(), opened[1][:, :, : self.room].clone()
        return opened

    def _widen(self, room: int) -> None:
        more, self.contexts.room = room - self.room, room
        for layer, (key, value) in self.scratch.items():
            self.scratch[layer] = pad(key, (0, 0, more, 0)), pad(value, (0, 0, more, 0))
            for new, old in zip(self.scratch[layer], (key, value), strict=True):
                new[:, :, : self.room] = old[:, :, : self.room]
                new[:, :, self.room : room] = 0
        self.room = room


class FiniteCache:
    """Mixin before the implementation of a draft's layer. It zeroes NaN in the K/V of dead rows, which would stay in a
    block and spoil what its next owner reads, masked or not."""

    written: Callable[[str, Tensor, Tensor], None] | None = None
    """Callback for K/V written outside of a forward: the layer's name, key and value [T, Hkv, D]."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        if self.written is not None:
            self.written(layer.layer_name, key, value)
        super().do_kv_cache_update(layer, finite(key), finite(value), kv_cache, slots)  # type: ignore[misc]


class TreeAttention:
    """Mixin before the class of a layer's implementation; with vLLM's own metadata, vLLM's code runs."""

    scale: float
    finite: ClassVar[type] = FiniteCache
    """Mixin of a draft's layers."""

    @classmethod
    def adopt(cls, layer: Any, *, drafts: bool = False) -> None:
        """Replace the implementation of one layer; other layers of its class keep theirs. `drafts`: the layer is the
        draft's."""
        original = type(layer.impl)
        bases = (cls.finite, cls, original) if drafts else (cls, original)
        impl: Any = object.__new__(type(f"Tree{original.__name__}", bases, {}))
        impl.__dict__.update(layer.impl.__dict__)
        layer.impl = impl

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        inputs = layer, query, key, value, kv_cache
        if isinstance(attn_metadata, TreeMetadata):
            if (others := attn_metadata.before()) is not None:
                super().forward(*inputs, others, output)  # type: ignore[misc]
            return attn_metadata.attend(self, *inputs, output)
        scales = (output_scale, output_block_scale)
        return super().forward(*inputs, attn_metadata, output, *scales)  # type: ignore[misc]

    def write(self, layer: Any, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write K/V [T, Hkv, D] to slots [T] of the layer's cache, -1: nowhere."""
        self.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)  # type: ignore[attr-defined]

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Read the blocks [R, B] of R requests as float32: key and value, [R, Hkv, B * block_size, head_size]."""
        raise NotImplementedError


def adopt_layers(
    config: Any,
    drafts: Collection[str],
    kind: type[TreeAttention],
    latent: type[TreeAttention] | None = None,
    *,
    caches: Collection[str] = (),
    levels: int | None = None,
) -> None:
    """Check the attention layers of the loaded models, and replace their implementations.

    Args:
        config: vLLM's VllmConfig.
        drafts: layers of the draft.
        kind: what replaces the implementations.
        latent: what replaces those of latent attention; None: there are none.
        caches: as in `check_layer`, beside a target with a tested class.
        levels: of the trees; None: a window may end inside them.
    """
    named = checks.is_named(config.model_config)
    for name, layer in checks.attention_layers(config).items():
        if latent is not None and latents.is_latent(layer):
            latents.check_layer(name, layer)
            latent.adopt(layer, drafts=name in drafts)
            continue
        checks.check_layer(name, layer, plain=name in drafts or not named, caches=caches if named else ())
        if levels is not None and name not in drafts:
            checks.check_window(name, AttentionVariant.of(layer.impl).window, levels)
        kind.adopt(layer, drafts=name in drafts)


class CPUTreeAttention(TreeAttention):
    """Mixin before vLLM's CPU attention."""

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        return gather_context(kv_cache, block_table, layer.isa)
