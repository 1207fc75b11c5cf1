"""Tokens per second of CPU time on SmolLM2-135M-Instruct, cold and warm, by requests at once, beside vLLM's chains.

    python -m benchmarks.smollm2_speed --chat texts/held_out.json --humaneval HumanEval.jsonl.gz \\
        --out benchmarks/results/smollm2_speed.json

Each row is a process of its own with one thread, without a cost profile of an earlier one, compiled as vLLM compiles
by default. Questions follow each other: as one ends the next begins, so that so many requests run in every step. Cold
are the first 64 steps, warm the 192 after them. Steps that read a prompt are left out. The CPU time of the process is
the clock, so that other programs on the machine change little. In brackets: a 90 % bootstrap interval over runs of 16
steps.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.smollm2 import held_out, humaneval
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.bench.vllm_55005 import repair_sampling

COLD, WARM, RUN = 64, 192, 16
"""Steps: cold ones, warm ones, and those of a bootstrap sample."""
NODES = 16
CONFIGURATIONS = {
    "no speculation": None,
    **{f"vLLM's chain of {n}": {"method": "eagle3", "num_speculative_tokens": n} for n in (1, 3, 5)},
    "adaptive_tree": {"method": "adaptive_tree", "num_speculative_tokens": NODES},
    "adaptive_tree, no look-up": {
        "method": "adaptive_tree",
        "num_speculative_tokens": NODES,
        "tree": {"lookup": None},
    },
}


def decode(engine: Any, questions: Iterator[str], clients: int, temperature: float) -> list[tuple[int, float]]:
    """Tokens and CPU seconds of each step that read no prompt, of so many requests at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=192)
    lengths: dict[str, int] = {}
    steps: list[tuple[int, float]] = []
    started, reads = 0, True
    while len(steps) < COLD + WARM:
        while len(lengths) < clients:
            engine.add_request(str(started), next(questions), params)
            lengths[str(started)] = 0
            started, reads = started + 1, True
        before = time.process_time()
        outputs = engine.step()
        seconds = time.process_time() - before
        tokens = 0
        for output in outputs:
            length = len(output.outputs[0].token_ids)
            tokens += length - lengths[output.request_id]
            lengths[output.request_id] = length
            if output.finished:
                del lengths[output.request_id]
        if not reads:
            steps.append((tokens, seconds))
        reads = 0 in lengths.values()  # a chunked prompt
    return steps


def rate(steps: list[tuple[int, float]]) -> dict[str, float]:
    """Tokens per second, a 90 % interval, and tokens per step."""
    runs = np.array(steps).reshape(-1, RUN, 2).sum(1)
    chosen = np.random.default_rng(0).integers(len(runs), size=(2000, len(runs)))
    tokens, seconds = runs[chosen].sum(1).T
    low, high = np.quantile(tokens / seconds, [0.05, 0.95])
    total = runs.sum(0)
    return {"rate": total[0] / total[1], "low": low, "high": high, "tokens_per_step": total[0] / len(steps)}


def cell(options: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    from benchmarks.tokens_per_step import start

    spec = CONFIGURATIONS[options.cell]
    spec = spec and {**spec, "model": options.head}
    seats = max(4, options.requests[0])
    llm = start(spec, options.model, options.dtype, seats=seats, eager=options.eager)
    repair_sampling()
    texts = humaneval(options.humaneval, 48) + held_out(options.chat, 48)
    questions = list(chat_prompts(options.model, texts))
    random.Random(0).shuffle(questions)
    steps = decode(llm.llm_engine, cycle(questions), options.requests[0], options.temperatures[0])
    return {"cold": rate(steps[:COLD]), "warm": rate(steps[COLD:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--head", help="folder of an EAGLE-3 head for it (default: the bundled one)")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, required=True, help="held_out.json of examples/chat_texts.py")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="run without compilation")
    parser.add_argument("--only", nargs="*", default=[""], help="configurations whose names contain one of these")
    parser.add_argument("--cell", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    options.head = options.head or SMOLLM2_HEAD
    options.model = options.model or fetch("smollm2", cache_folder() / "models", say=print).folder
    if options.cell:
        print(json.dumps(cell(options)))
        return
    rows: list[dict[str, Any]] = []
    for requests in options.requests:
        for temperature in options.temperatures:
            for name in (name for name in CONFIGURATIONS if any(part in name for part in options.only)):
                rows.append({"configuration": name, "requests": requests, "temperature": temperature})
                rows[-1] |= _in_a_process(options, rows[-1])
                print(rows[-1], flush=True)
                if options.out:
                    save(options.out, rows)


def _in_a_process(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    same = [f"--{name}={getattr(options, name)}" for name in ("model", "head", "humaneval", "chat", "dtype")]
    same += ["--eager"] if options.eager else []
    own = [f"--cell={row['configuration']}", f"--requests={row['requests']}", f"--temperatures={row['temperature']}"]
    command = [sys.executable, "-m", "benchmarks.smollm2_speed", *same, *own]
    with tempfile.TemporaryDirectory() as cache:
        clock = {"VLLM_CACHE_ROOT": cache, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env={**os.environ, **clock}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
