"""Structured output by kind of grammar: tokens per step and seconds of vLLM's chain and of trees.

    python -m benchmarks.structured --out benchmarks/results/structured.json

float32, the bundled models, half of the requests greedy and half seeded at 0.9, up to 48 tokens each, 16 at a time.
"First paths": only the most likely path of each tree, drafted without the grammar, as version 0.1 did. "No draft
masks": trees with a mask for each node, drafted without the grammar, as Model Runner V2 does. Seconds are medians
over rounds; the masks' are those of the scheduler's and the draft's together. "Two ranks": with tensor parallelism,
whose masks of the draft are in another process, and not in these seconds.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.tokens_per_step import PAIR, prompts
from vllm_adaptive_tree.bench.provenance import save

BATCH = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
}
TAGS = {"structures": [{"begin": "self.", "schema": {"type": "integer"}, "end": " "}], "triggers": ["self"]}
SHAPES: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"},
    "choice": {"choice": ["None", "NotImplemented", "NotImplementedError", "not implemented yet"]},
    "JSON schema": {"json": SCHEMA},
    "EBNF": {"grammar": 'root ::= "return " term (" + " term)*\nterm ::= [a-z]+ | "(" [a-z]+ " * " [0-9]+ ")"'},
    "JSON object": {"json_object": True},
    "structural tag": {"structural_tag": json.dumps(TAGS)},
}
MIX = list(SHAPES)[:4]
KINDS = [*SHAPES, "mix"]


def batch(kind: str) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kinds = MIX if kind == "mix" else [kind]
    return [
        SamplingParams(
            temperature=0.9 if (i // len(kinds)) % 2 else 0.0,
            seed=i,
            max_tokens=48,
            structured_outputs=StructuredOutputsParams(**SHAPES[kinds[i % len(kinds)]]),
        )
        for i in range(BATCH)
    ]


def without_draft_masks(worker: Any) -> None:
    step = worker.model_runner.step
    original = step.draft

    def draft(host_draft: Any) -> None:
        host_draft.grammars = {}
        original(host_draft)

    step.draft = draft


def first_paths(worker: Any) -> None:
    from vllm_adaptive_tree.trees import TokenTree

    without_draft_masks(worker)
    runner = worker.model_runner
    original = runner.step.draft

    def draft(host_draft: Any) -> None:
        original(host_draft)
        drafts = runner.engine.drafts
        for name, drafted in drafts.items():
            nodes = drafted.tree.first_path()
            chain = TokenTree.chain([drafted.tree.tokens[node] for node in nodes])
            entries = [0, *(1 + node for node in nodes)]
            rows = {field: [getattr(drafted, field)[at] for at in entries] for field in ("row", "num_planned")}
            drafts[name] = drafted._replace(tree=chain, **rows)

    runner.step.draft = draft


class MaskClock:
    """Seconds spent in masks, of scheduler and draft, and steps of requests."""

    def __init__(self) -> None:
        self.seconds, self.steps, self.watched = 0.0, 0, set[Any]()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # copies its mark, or the next engine replaces it again
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return run

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(scheduler: Any, scheduled: Any, output: Any) -> Any:
            self.steps += sum(bool(tokens) for tokens in output.sampled_token_ids)
            return function(scheduler, scheduled, output)

        return run

    def watch(self) -> None:
        """Watch the functions; called once an engine has started, which may have replaced them."""
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager as Manager

        from vllm_adaptive_tree.engine.grammar.masked_drafter import MaskedDrafter

        if not self.watched:
            Scheduler.update_from_output = self.counted(Scheduler.update_from_output)
        names = (Manager, "grammar_bitmask"), (Manager, "validate_tokens"), (MaskedDrafter, "_masked")
        for owner, name in names:
            if (function := getattr(owner, name)) not in self.watched:
                timed = self.timed(function)
                self.watched.add(timed)
                setattr(owner, name, timed)


def measure(llm: Any, clock: MaskClock, kind: str, texts: list[str], rounds: int) -> dict[str, Any]:
    """Measure one row: tokens, requests that failed, tokens per step, nodes per step, seconds, and seconds in masks."""

    def nodes() -> float:
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")

    seconds, masks, tokens, failed, before, steps = [], [], 0, 0, nodes(), -clock.steps
    for _ in range(rounds):
        seconds.append(0.0)
        masks.append(-clock.seconds)
        for first in range(0, len(texts), BATCH):
            started = time.perf_counter()
            outputs = llm.generate(texts[first : first + BATCH], batch(kind), use_tqdm=False)
            seconds[-1] += time.perf_counter() - started
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            failed += sum(output.outputs[0].finish_reason == "error" for output in outputs)
        masks[-1] += clock.seconds
    steps += clock.steps
    return {
        "kind": kind,
        "tokens": tokens // rounds,
        "failed": failed / rounds,
        "tokens_per_step": tokens / steps,
        "nodes_per_step": (nodes() - before) / steps,
        "seconds": statistics.median(seconds),
        "mask_seconds": statistics.median(masks),
    }


def run(name: str, clock: MaskClock, kinds: list[str], count: int, rounds: int) -> list[dict[str, Any]]:
    from vllm import LLM

    spec, change, ranks = WAYS[name]
    cores = {} if ranks == 1 else {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}  # one each
    with patch.dict(os.environ, cores):
        llm = LLM(
            str(PAIR / "target"),
            speculative_config=spec,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            disable_log_stats=False,
            tensor_parallel_size=ranks,
        )
    llm.collective_rpc(change)
    clock.watch()
    texts, rows = prompts(count), []
    for kind in kinds:
        llm.generate(texts[:BATCH], batch(kind), use_tqdm=False)  # compiles the grammar
        rows.append({"way": name, **measure(llm, clock, kind, texts, rounds)})
        print(rows[-1], flush=True)
    llm.llm_engine.engine_core.shutdown()
    return rows


def tree(method: str, **options: Any) -> dict[str, Any]:
    options = {"budget": None, "cost_profile": None, **options}
    return {"method": method, "model": str(PAIR / "draft"), "num_speculative_tokens": 12, "tree": options}


def unchanged(worker: Any) -> None:
    pass


OPT_TREE = tree("opt_tree", threshold=0.2)
CHAIN = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": 4}
WAYS: dict[str, tuple[dict[str, Any] | None, Callable[[Any], None], int]] = {
    "no draft": (None, unchanged, 1),
    "vLLM's chain of 4": (CHAIN, unchanged, 1),
    "first paths": (OPT_TREE, first_paths, 1),
    "OPT-Tree, no draft masks": (OPT_TREE, without_draft_masks, 1),
    "OPT-Tree": (OPT_TREE, unchanged, 1),
    "DySpec": (tree("dyspec"), unchanged, 1),
    "OPT-Tree, two ranks, no draft masks": (OPT_TREE, without_draft_masks, 2),
    "OPT-Tree, two ranks": (OPT_TREE, unchanged, 2),
}
"""Way -> speculative_config, change of each worker, number of ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clock = MaskClock()
    rows = [row for way in options.ways for row in run(way, clock, options.kinds, options.prompts, options.rounds)]
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
