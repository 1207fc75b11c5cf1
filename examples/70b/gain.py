"""What a tree would gain: a projection from data sheets, and no measurement.

Forwards cost what `bench --project` takes them to cost (`bench/projection.py`) over a roofline: reading the weights, or
the operations. To them comes what is moved through memory: K/V of the contexts, and what this release's drafting moves
besides (`Moved`). Launches, all-reduces and all work of a host take no time here.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from memory import FULL, HALF, Load
from model import Shard

from vllm_adaptive_tree.bench.costs import roofline
from vllm_adaptive_tree.budget import Costs

REDUCED = 2
"""All-reduces of a layer, where it is cut over ranks."""


class GPU(NamedTuple):
    """Of a data sheet, SXM; the memory as a driver reports it."""

    name: str
    memory: float  # GiB
    bandwidth: float  # bytes per second
    bf16: float  # operations per second, dense
    fp8: float


GPUS = {
    "h100": GPU("H100", 79.0, 3.35e12, 989e12, 1979e12),
    "h200": GPU("H200", 139.0, 4.8e12, 989e12, 1979e12),
}


class Acceptance(NamedTuple):
    """Greedy OPT-Tree on other models: nobody here has measured these two."""

    source: str
    tokens: float  # per step
    forwards: float  # of the draft per step, the one over accepted tokens included


DEPTH = 10  # of the trees behind all these figures
OURS = {5: (2.25, 2.94), 10: (2.57, 3.69), 25: (2.97, 4.68), 50: (3.25, 5.39)}
"""Nodes: tokens and draft forwards per step of the bundled pair (benchmarks/results/papers/tables.md)."""
PAPER = {"LLaMA-2-7B, draft 1B": 4.88, "LLaMA-2-70B, draft 7B": 7.74}
"""Tokens per step in OPT-Tree's paper, at 25 to 60 nodes (benchmarks/results/papers/tables.md)."""
MOST_OF_PAPER = 60


def acceptances(load: Load) -> tuple[Acceptance, ...]:
    """What is known of trees that are no larger; the paper gives no draft forwards, so a step is charged with all."""
    if load.depth < DEPTH:
        return ()
    sizes = [nodes for nodes in OURS if nodes <= load.nodes]
    ours = [Acceptance(f"the bundled pair, {max(sizes)} nodes", *OURS[max(sizes)])] if sizes else []
    paper = PAPER.items() if load.nodes >= MOST_OF_PAPER else ()
    return *ours, *(Acceptance(pair, tokens, load.depth) for pair, tokens in paper)


def costs(gpu: GPU, target: Shard, draft: Shard, most: int) -> Costs:
    """Seconds of forwards of one rank, up to `most` rows, from the weights alone."""
    curves = (
        roofline(
            shard.read[0],
            most,
            width=shard.read[1] / shard.read[0],
            bandwidth=gpu.bandwidth,
            operations=gpu.fp8 if shard.fp8 else gpu.bf16,
        )
        for shard in (target, draft)
    )
    return Costs(*curves)


class Moved(NamedTuple):
    """Bytes that drafting reads and writes besides weights, as `memory.TreeBuffers` has its buffers."""

    opening: float
    """In a step: the contexts out of the cache, to float32, and with room in front."""
    attention: float
    """In a level, all layers: keys and values for every query head, scores and softmax."""
    logits: float
    """In a level: gathered from all ranks, their law in float32, its maxima."""

    @classmethod
    def of(cls, draft: Shard, load: Load) -> "Moved":
        model, requests = draft.model, load.requests
        length = fmean(load.rooms) + load.padded
        one_head = requests * length * model.head_size * FULL
        repeated = 2 * (draft.kv_heads + draft.heads) if draft.heads > draft.kv_heads else 0
        keys = one_head * (repeated + 4 * draft.heads)  # scaled, then keys and values read
        scores = requests * draft.heads * load.nodes * length * FULL * 6
        copies = 2 * requests * draft.kv_heads * load.padded * model.head_size * (3 * HALF + 3 * FULL)
        gathered = 4 * HALF if draft.ranks > 1 else 0
        entry = gathered + 3 * HALF + 7 * FULL
        return cls(
            opening=model.layers * copies,
            attention=model.layers * (keys + scores),
            logits=load.level_rows * model.vocabulary * entry,
        )

    def in_step(self, levels: float) -> float:
        return self.opening + levels * (self.attention + self.logits)


@dataclass(frozen=True, slots=True)
class Gain:
    acceptance: Acceptance
    plain: float
    """Seconds of a step without a tree."""
    step: float
    """Seconds of a step with whole trees."""

    @classmethod
    def of(cls, gpu: GPU, target: Shard, draft: Shard, load: Load, acceptance: Acceptance) -> "Gain":
        """`load`: so many requests, all of this context."""
        requests, levels = load.requests, acceptance.forwards - 1
        model = costs(gpu, target, draft, requests * (2 + load.nodes))
        contexts = requests * load.context * target.kv / gpu.bandwidth
        assert model.draft is not None
        drafting = model.draft.cost(requests * (2 + load.nodes)) + levels * model.draft.cost(load.level_rows)
        moved = requests * load.context * draft.kv + Moved.of(draft, load).in_step(levels)
        return cls(
            acceptance,
            model.verify.cost(requests) + contexts,
            model.verify.cost(load.rows) + contexts + drafting + moved / gpu.bandwidth,
        )

    @property
    def ratio(self) -> float:
        """Tokens per second to those without speculation."""
        return self.acceptance.tokens * self.plain / self.step

    @property
    def spare(self) -> float:
        """Seconds more than a plain step's that launches, all-reduces and the host may take in a step of a tree before
        nothing is gained."""
        return self.acceptance.tokens * self.plain - self.step


def reduced(target: Shard, draft: Shard, acceptance: Acceptance) -> tuple[int, int]:
    """All-reduces of a plain step, and of one with a tree."""
    plain = REDUCED * target.model.layers if target.ranks > 1 else 0
    drafting = REDUCED * draft.model.layers if draft.ranks > 1 else 0
    return plain, plain + round(acceptance.forwards * drafting)
