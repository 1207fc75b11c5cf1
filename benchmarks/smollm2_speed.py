"""Tokens per second of CPU time on SmolLM2-135M-Instruct, cold and warm, by requests at once, beside vLLM's chains.

    python -m benchmarks.smollm2_speed --chat texts/held_out.json --humaneval HumanEval.jsonl.gz \\
        --out benchmarks/results/smollm2_speed.json

Each configuration is a process with one thread, compiled as vLLM compiles by default; a tree method, which learns, has
a new one for each row, which knows no costs of an earlier one. Questions follow each other: as one ends the next
begins, so that so many requests run in every step. Cold are the first 128 tokens of each request at once, warm the 512
after them, so that all configurations are compared on the same text where it is greedy: a text has parts that are easy
to draft. Steps that read a prompt are left out. The CPU time of the process is the clock; run nothing beside it all the
same, since the cores share the memory. In brackets: a 90 % bootstrap interval over runs of 16 steps.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.smollm2 import held_out, humaneval
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.bench.vllm_55005 import repair_sampling

COLD, WARM = 128, 512
"""Tokens of each request at once: cold ones, warm ones."""
RUN = 16
"""Steps of a bootstrap sample."""
NODES = 16
CONFIGURATIONS = {
    "no speculation": None,
    **{f"vLLM's chain of {n}": {"method": "eagle3", "num_speculative_tokens": n} for n in (1, 3, 5)},
    **{
        name: {"method": "adaptive_tree", "num_speculative_tokens": NODES, "tree": {"cost_profile": None, **options}}
        for name, options in (("adaptive_tree", {}), ("adaptive_tree, no look-up", {"lookup": None}))
    },
}


Steps = list[tuple[int, float]]
"""Tokens and CPU seconds of each step."""


def decode(engine: Any, questions: Iterator[str], clients: int, temperature: float) -> tuple[Steps, Steps]:
    """Cold steps and warm ones that read no prompt, of so many requests at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=192)
    lengths: dict[str, int] = {}
    cold, warm = Steps(), Steps()
    started, total, reads = 0, 0, True
    while total < (COLD + WARM) * clients:
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
            (cold if total < COLD * clients else warm).append((tokens, seconds))
        total += tokens
        reads = 0 in lengths.values()  # a chunked prompt
    engine.abort_request(list(lengths))
    while engine.has_unfinished_requests():
        engine.step()
    return cold, warm


def rate(steps: Steps) -> dict[str, float]:
    """Tokens per second, a 90 % interval, and tokens per step."""
    runs = np.add.reduceat(np.array(steps), np.arange(0, len(steps), RUN))
    chosen = np.random.default_rng(0).integers(len(runs), size=(2000, len(runs)))
    tokens, seconds = runs[chosen].sum(1).T
    low, high = np.quantile(tokens / seconds, [0.05, 0.95])
    total = runs.sum(0)
    return {"rate": total[0] / total[1], "low": low, "high": high, "tokens_per_step": total[0] / len(steps)}


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one configuration, in this process."""
    from benchmarks.tokens_per_step import start

    spec = CONFIGURATIONS[options.cell]
    spec = spec and {**spec, "model": options.head}
    llm = start(spec, options.model, options.dtype, seats=16, eager=options.eager, tokens=512)
    repair_sampling()
    texts = humaneval(options.humaneval, 48) + held_out(options.chat, 48)
    questions = list(chat_prompts(options.model, texts))
    random.Random(0).shuffle(questions)
    for requests, temperature in product(options.requests, options.temperatures):
        cold, warm = decode(llm.llm_engine, cycle(questions), requests, temperature)
        row = {"configuration": options.cell, "requests": requests, "temperature": temperature}
        yield row | {"cold": rate(cold), "warm": rate(warm)}


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
        for row in cells(options):
            print(json.dumps(row), flush=True)
        return
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp()  # of what is compiled
    whole, rows = (options.requests, options.temperatures), list[dict[str, Any]]()
    for name in (name for name in CONFIGURATIONS if any(part in name for part in options.only)):
        learns = name.startswith("adaptive_tree")
        for requests, temperatures in [([one], [two]) for one, two in product(*whole)] if learns else [whole]:
            for row in _in_a_process(options, name, requests, temperatures):
                rows.append(row)
                print(row, flush=True)
                if options.out:
                    save(options.out, rows)


def _in_a_process(
    options: argparse.Namespace, name: str, requests: Sequence[int], temperatures: Sequence[float]
) -> Iterator[dict[str, Any]]:
    same = [f"--{name}={getattr(options, name)}" for name in ("model", "head", "humaneval", "chat", "dtype")]
    own = [f"--cell={name}", "--requests", *map(str, requests), "--temperatures", *map(str, temperatures)]
    command = [sys.executable, "-m", "benchmarks.smollm2_speed", *same, *own, *["--eager"] * options.eager]
    clock = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env={**os.environ, **clock}, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            if line.startswith('{"configuration"'):
                yield json.loads(line)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


if __name__ == "__main__":
    main()
