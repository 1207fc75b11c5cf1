"""Memory of each GPU and a projected gain, for a Llama with a Llama as its draft: `python examples/70b/estimate.py`.

Nothing here was measured on a GPU. README.md says what is assumed.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gain import DEPTH, GPU, GPUS, OURS, Acceptance, Gain, acceptances, reduced
from memory import Load, TreeBuffers
from model import Model, Shard

CONFIGS = Path(__file__).parent / "configs"
GIB = 1 << 30
RESERVED = 4.0
"""GiB that vLLM counts itself: CUDA's context, NCCL, graphs, activations. A guess."""
SLACK = 1.0
"""GiB of holes between buffers. A guess."""
USUAL = 0.92
"""vLLM's own `gpu_memory_utilization`."""
SHORT = 2048
"""Tokens of a context that is not long."""


class Plan:
    """One engine on `ranks` GPUs."""

    def __init__(self, target: Model, draft: Model, ranks: int, fp8: bool, load: Load, gpu: GPU):
        self.target, self.draft = Shard(target, ranks, fp8), Shard(draft, ranks)
        self.load, self.gpu, self.ranks = load, gpu, ranks
        self.buffers = TreeBuffers.of(self.target, self.draft, load)

    @property
    def kv(self) -> int:
        """Bytes of a token, target and draft."""
        return self.target.kv + self.draft.kv

    @property
    def kv_of_all(self) -> int:
        """Bytes, if every request is as long as it may be, with places for its tree."""
        return self.load.requests * (self.load.context + 1 + self.load.nodes) * self.kv

    @property
    def utilization(self) -> float:
        """For vLLM's `gpu_memory_utilization`: its memory profile does not see a tree's buffers."""
        free = self.gpu.memory - self.buffers.peak / GIB - SLACK
        return min(USUAL, math.floor(100 * free / self.gpu.memory) / 100)

    @property
    def room(self) -> float:
        """Bytes for K/V; below 0: the models do not fit."""
        weights = self.target.weights + self.draft.weights
        return self.utilization * self.gpu.memory * GIB - RESERVED * GIB - weights

    @property
    def tokens(self) -> int:
        """That fit into the K/V cache."""
        return max(0, int(self.room // self.kv))


def memory_table(plans: Sequence[Plan], servers: Sequence[int]) -> list[tuple[str, ...]]:
    first = plans[0]
    requests, context = first.load.requests, first.load.context
    lines = {
        "target's weights": lambda plan: gib(plan.target.weights),
        "draft's weights": lambda plan: gib(plan.draft.weights),
        "K/V of a token, target + draft": lambda plan: f"{plan.target.kv / 1024:g} + {plan.draft.kv / 1024:g} KiB",
        f"K/V of {requests} requests of {context:,} tokens": lambda plan: gib(plan.kv_of_all),
        "tree: the draft's contexts": lambda plan: gib(plan.buffers.contexts),
        "tree: a draft level": lambda plan: gib(max(plan.buffers.attention, plan.buffers.logits)),
        "tree: logits of a verification": lambda plan: gib(plan.buffers.verified),
        "tree: masks, draft's logits, K/V of verified rows": lambda plan: gib(plan.buffers.masks + plan.buffers.kept),
        "tree: at most at a time": lambda plan: gib(plan.buffers.peak),
        "`--gpu-memory-utilization`, at most": lambda plan: f"{plan.utilization:.2f}",
        "tokens that the K/V cache then holds": lambda plan: f"{plan.tokens:,}" if plan.tokens else "none",
    }
    head = tuple(
        f"{plan.ranks} GPUs{f', {n} servers' if n > 1 else ''}" for plan, n in zip(plans, servers, strict=True)
    )
    return [(f"GiB of each {first.gpu.name}", *head), *((name, *map(line, plans)) for name, line in lines.items())]


def gain_table(plans: Sequence[Plan], loads: Sequence[tuple[int, int]]) -> list[tuple[str, ...]]:
    """`loads`: requests at a time, and the context of each."""
    sources = acceptances(plans[0].load)
    rows = [("GPUs", "requests, tokens of each", "plain step", *(f"{one.tokens:g} tokens per step" for one in sources))]
    for plan in plans:
        for requests, context in loads:
            load = replace(plan.load, requests=requests, context=context)
            gains = [Gain.of(plan.gpu, plan.target, plan.draft, load, one) for one in sources]
            found = (f"{one.ratio:.2f} ({1e3 * one.spare:+.1f} ms)" for one in gains)
            rows.append((str(plan.ranks), f"{requests}, {context:,}", f"{1e3 * gains[0].plain:.1f} ms", *found))
    return rows


def all_reduces(plan: Plan, sources: Sequence[Acceptance]) -> str:
    """What the table above leaves out, counted."""
    counts = [reduced(plan.target, plan.draft, one) for one in sources]
    trees = ", ".join(str(with_tree) for _, with_tree in counts)
    return f"All-reduces of a step: {counts[0][0]} without a tree; {trees} with one."


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def markdown(table: Sequence[tuple[str, ...]]) -> str:
    head, *rows = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join([head, "| --- " * len(table[0]) + "|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default=CONFIGS / "target", help="folder with a config.json")
    parser.add_argument("--draft", default=CONFIGS / "draft", help="folder with a config.json")
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[4, 8, 16], metavar="GPUS")
    parser.add_argument("--gpus-per-server", type=int, default=8, metavar="GPUS")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--weights", choices=("bf16", "fp8"), default="bf16", help="of the target's linear layers")
    parser.add_argument("--requests", type=int, default=4, help="vLLM's max_num_seqs")
    parser.add_argument("--context", type=int, default=16_384, help="vLLM's max_model_len")
    parser.add_argument("--nodes", type=int, default=63, help="num_speculative_tokens")
    parser.add_argument("--depth", type=int, default=10, help="max_depth of the trees")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="vLLM's max_num_batched_tokens")
    asked = parser.parse_args(arguments)
    try:
        load = Load(asked.requests, asked.context, asked.nodes, asked.depth)
        if load.requests * (2 + load.nodes) > asked.batched_tokens:
            raise ValueError(
                f"{load.requests} requests of {load.nodes} nodes need {load.requests * (2 + load.nodes)} tokens in a "
                f"step, and max_num_batched_tokens is {asked.batched_tokens}; lower --requests or --nodes"
            )
        target, draft = Model.read(asked.target), Model.read(asked.draft)
        fp8, gpu = asked.weights == "fp8", GPUS[asked.gpu]
        plans = [Plan(target, draft, ranks, fp8, load, gpu) for ranks in asked.tensor_parallel]
    except ValueError as error:
        parser.error(str(error))
    short = min(SHORT, load.context)
    loads = list(dict.fromkeys([(1, short), (1, load.context), (load.requests, short)]))
    servers = [-(-plan.ranks // asked.gpus_per_server) for plan in plans]
    print(markdown(memory_table(plans, servers)), end="\n\n")
    if sources := acceptances(load):
        print(markdown(gain_table(plans, loads)), end="\n\n")
        print(all_reduces(plans[-1], sources))
    else:
        print(f"No acceptance is known of trees of fewer than {DEPTH} levels or {min(OURS)} nodes, so no gain.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
