"""CUDA graphs and buffers of a draft, computed from the engine's own sizes: version 0.1 and now.

    python -m benchmarks.gpu.sizes --out benchmarks/results/gpu/sizes.json

`graphs`: of 1 to 128 nodes and 1 to 64 requests, how many fullest batches of trees have no CUDA graph of vLLM's, whose
sizes are its own function's. `drafts`: for `max_num_seqs` requests, bytes of the K/V of levels and of kept logits, and
CUDA graphs of the draft with the forwards in them. Version 0.1 sized all of them by `max_num_seqs`, without a bound.
`prompts`: tokens of a step that are left for prompts beside running requests, without speculation, and
with `budget` "auto".
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import VllmConfig

from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.engine.common.node_quota import MOST_ROWS, MOST_TREES, schedule
from vllm_adaptive_tree.engine.targets.gpu_arguments import captured
from vllm_adaptive_tree.engine.v2.drafting import KEPT, level_width
from vllm_adaptive_tree.engine.v2.graphs import ladder

TOKENS = 8192
"""`max_num_batched_tokens`."""
HALF = 2  # bytes


class Draft(NamedTuple):
    name: str
    layers: int
    kv_heads: int
    head_size: int
    vocabulary: int
    nodes: int
    depth: int
    keeps_logits: bool


DRAFTS = (
    Draft("Qwen3-0.6B, opt_tree", 28, 8, 128, 151936, 24, 10, keeps_logits=False),
    Draft("Qwen3-0.6B, dyspec", 28, 8, 128, 151936, 24, 16, keeps_logits=True),
    Draft("Qwen3-0.6B, dyspec", 28, 8, 128, 151936, 64, 16, keeps_logits=True),
    Draft("EAGLE-3 for Llama 8B, opt_tree", 1, 8, 128, 128256, 60, 10, keeps_logits=False),
)
REQUESTS = 64, 256, 1024


def capture_sizes(most: int, requests: int, tokens: int) -> list[int]:
    """Sizes that vLLM's own function makes of a maximum."""
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        max_cudagraph_capture_size=most,
        cudagraph_capture_sizes=None,
        post_init_cudagraph_sizes=lambda: None,
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=requests),
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    sizes: list[int] = compilation.cudagraph_capture_sizes
    return sizes


def fullest_batches() -> dict[str, int]:
    """Fullest batches of at most `MOST_ROWS` rows, and those without a graph if the maximum is their number of rows, as
    in version 0.1, or what it is now."""
    known: dict[int, int] = {}

    def largest(most: int) -> int:
        if most not in known:
            known[most] = capture_sizes(most, 64, TOKENS)[-1]
        return known[most]

    rows = [requests * (1 + nodes) for nodes in range(1, 129) for requests in range(1, 65)]
    rows = [count for count in rows if count <= MOST_ROWS]
    without = {"before": lambda count: count, "now": captured}
    return {"all": len(rows)} | {
        name: sum(largest(most(count)) < count for count in rows) for name, most in without.items()
    }


def sizes(draft: Draft, requests: int, *, bounded: bool) -> dict[str, int]:
    """Of an engine of at most so many requests. `bounded`: as now."""
    trees = min(requests, MOST_TREES) if bounded else requests
    kept = KEPT // (draft.vocabulary * HALF) if draft.keeps_logits and bounded else None
    width = {
        count: level_width(count, draft.nodes, TOKENS, levels=draft.depth, kept=kept) for count in range(1, 1 + trees)
    }
    rows, steps = max(count * width[count] for count in width), ladder(trees)
    slots = {count: 1 + (draft.depth - 1) * width[count] if draft.keeps_logits else 1 for count in steps}
    reading = [count for count in steps if count * (draft.depth + 2) <= TOKENS]
    return {
        "keys": draft.layers * 2 * rows * (draft.depth - 1) * draft.kv_heads * draft.head_size * HALF,
        "logits": max(count * slots[count] for count in steps) * draft.vocabulary * HALF,
        "graphs": len(steps) * draft.depth + len(reading),
        "forwards": len(steps) * sum(range(draft.depth)) + len(reading),
    }


def left_for_prompts(nodes: int, running: int) -> dict[str, int]:
    """Tokens of a step that prompts may have beside so many running requests, which draft or rest."""
    found = {"none": TOKENS - running}
    for name, budget in (("before", None), ("now", "auto")):
        quotas = schedule(requests=running, nodes=nodes, room=TOKENS, budget=budget)
        found[name] = TOKENS - running * (2 + quotas[-1][2])
    return {"nodes": nodes, "requests": running, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    drafts = [
        {**draft._asdict(), "max_num_seqs": requests}
        | {name: sizes(draft, requests, bounded=now) for name, now in (("before", False), ("now", True))}
        for draft in DRAFTS
        for requests in REQUESTS
    ]
    prompts = [left_for_prompts(nodes, running) for nodes in (24, 64) for running in (16, 64, 128, 256)]
    found = {"graphs": fullest_batches(), "drafts": drafts, "prompts": prompts}
    if options.out is not None:
        save(options.out, [found])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
