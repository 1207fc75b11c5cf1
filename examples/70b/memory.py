"""Memory of one GPU that `adaptive_tree` takes in a step, beside what vLLM itself allocates: an upper bound.

The formulas follow `vllm_adaptive_tree/engine/v2` and what it calls, buffer by buffer, as this release has them.
"""

from dataclasses import dataclass

from model import Shard

from vllm_adaptive_tree.engine.common.contexts import ROOM

BLOCK = 16
"""Tokens of a page of vLLM's cache on a GPU."""
CHUNK = 1 << 30
"""Bytes of float32 logits that vLLM's sampler works on at once."""
PROCESSORS, LANES = 160, 128
"""Of a GPU and of a query tile, at most: partial results of the tree attention kernel."""
FULL, HALF, INDEX = 4, 2, 8  # bytes: float32, bfloat16, int64


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    """That run at a time: vLLM's `max_num_seqs`."""
    context: int
    """Tokens of the longest request: vLLM's `max_model_len`."""
    nodes: int
    """Of each tree: `num_speculative_tokens`."""
    depth: int
    """Levels of a tree, at most: `max_depth`."""

    def __post_init__(self) -> None:
        for name in ("requests", "context", "nodes", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def rows(self) -> int:
        """Of a verification: roots and nodes."""
        return self.requests * (1 + self.nodes)

    @property
    def level_rows(self) -> int:
        """Of a draft forward: each level has as many columns as a tree has nodes."""
        return self.requests * self.nodes

    @property
    def columns(self) -> int:
        """Of one request, over all levels that the draft reads; the last one it does not."""
        return self.nodes * (self.depth - 1)

    @property
    def padded(self) -> int:
        """Tokens of a context as it is copied: whole pages."""
        return -(-(1 + self.context) // BLOCK) * BLOCK

    @property
    def rooms(self) -> list[int]:
        """Places in front of a context for the nodes of a tree, level by level: doubled where they do not suffice."""
        rooms = [ROOM]
        for level in range(1, self.depth):
            columns = level * self.nodes
            rooms.append(rooms[-1] if columns <= rooms[-1] else 2 * columns)
        return rooms[1:] or rooms

    @property
    def room(self) -> int:
        """At the end of a step."""
        return self.rooms[-1]


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Bytes of one GPU. Drafting and verifying take turns; `kept` lives through both."""

    contexts: int
    """The draft's contexts, copied in float32 with room for the nodes: every layer's, for a whole step."""
    attention: int
    """Of one draft level in one layer, by PyTorch's operations in float32."""
    logits: int
    """Of a draft level: of all its columns over the whole vocabulary, on every rank."""
    masks: int
    """Which node sees which, and the trees while they grow."""
    verified: int
    """Logits of a verification, and what a sampler makes of them."""
    kept: int
    """Finished trees, and the draft's logits that the rule reads; the target's K/V of verified rows, until the accepted
    ones are at home."""

    @classmethod
    def of(cls, target: Shard, draft: Shard, load: Load) -> "TreeBuffers":
        requests, nodes, room = load.requests, load.nodes, load.room
        length = room + load.padded
        layer = 2 * requests * draft.kv_heads * length * draft.model.head_size * FULL
        level = load.level_rows * draft.model.vocabulary
        seen = requests * (1 + load.columns) * load.columns
        bias = load.level_rows * (length + 2 * room) * FULL
        growth = requests * nodes * (1 + load.depth) * 16 * INDEX
        return cls(
            contexts=draft.model.layers * layer,
            # Beside the logits of the level before; a context is copied, and room made, layer by layer.
            attention=level * HALF + max(layer, _attention(draft, load, length)),
            # Gathered from all ranks, then their law in float32 and its maxima.
            logits=level * (3 * HALF) + level * HALF // draft.ranks + level * FULL // 16 + _candidates(load),
            masks=2 * seen + load.level_rows * load.columns + bias + growth,
            verified=_verified(target, load) + _partial(target) + _bits(load),
            kept=load.rows * target.kv + 3 * growth + requests * (1 + load.columns) * draft.model.vocabulary * HALF,
        )

    @property
    def drafting(self) -> int:
        return self.contexts + self.masks + max(self.attention, self.logits)

    @property
    def peak(self) -> int:
        return self.kept + max(self.drafting, self.verified)


def _attention(draft: Shard, load: Load, length: int) -> int:
    """PyTorch's `scaled_dot_product_attention` with a mask and in float32: keys and values are repeated for the query
    heads, the keys scaled; then scores, softmax, a mask of empty rows, and the two chosen between."""
    heads, size = draft.heads, draft.model.head_size
    whole = load.requests * heads * length * size * FULL
    scores = load.requests * heads * load.nodes * length
    repeated = 2 if heads > draft.kv_heads else 0
    queries = 4 * load.level_rows * heads * size * FULL
    return queries + max(
        (repeated + 1) * whole + scores * FULL,
        repeated * whole + scores * (3 * FULL + 1),
    )


def _candidates(load: Load) -> int:
    """The best of a level, out of chunks of 64 tokens."""
    return load.requests * load.nodes * 64 * 4 * INDEX


def _verified(target: Shard, load: Load) -> int:
    """In 16 bits, gathered from all ranks; then in float32, a chunk at a time, of whole paths where penalties are."""
    vocabulary = target.model.vocabulary
    whole = load.rows * vocabulary
    paths = load.requests * (1 + load.depth) * vocabulary * (HALF + FULL)
    gathered = whole * HALF + whole * HALF // target.ranks
    return whole * HALF + max(gathered, paths, min(whole * FULL, CHUNK))


def _partial(target: Shard) -> int:
    return PROCESSORS * LANES * (target.model.head_size + 1) * FULL


def _bits(load: Load) -> int:
    words = -(-(1 + load.nodes) // 64)
    return 3 * load.rows * words * INDEX
