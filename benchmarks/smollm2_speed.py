"""Tokens per second of CPU time on SmolLM2-135M-Instruct, cold and warm, by requests at once, beside vLLM's chains.

    python -m benchmarks.smollm2_speed --chat texts/held_out.json --humaneval HumanEval.jsonl.gz \\
        --out benchmarks/results/smollm2_speed.json

Each configuration is a process with one thread, compiled as vLLM compiles by default. They take turns of 32 tokens a
request at the same questions, so that a machine that drifts drifts for all of them, and greedy ones decode the same
text: a text has parts that are easy to draft. Questions follow each other: as one ends the next begins, so that so many
requests run in every step. Cold are the first 128 tokens of each request at once, as often as 1,024 tokens allow,
each time from what a tree method knew when its engine had started; warm are 128 to 512 more. Steps that read a prompt
are left out. The CPU time of the process is the clock; run nothing beside it all the same, since the cores share the
memory. In brackets: a 90 % bootstrap interval over turns.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import compress, cycle, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.smollm2 import held_out, humaneval
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.bench.vllm_55005 import repair_sampling

TURN, COLD = 32, 128
"""Tokens of each request at once: of a turn, and of a cold start."""
COLD_TOKENS, WARM_TOKENS = 1024, 1024
"""Tokens of all cold starts of a row, at least of one; of its warm turns, within `WARM` for each request."""
WARM = 128, 512
NODES = 16
PLAIN = "no speculation"
CONFIGURATIONS = {
    PLAIN: None,
    **{f"vLLM's chain of {n}": {"method": "eagle3", "num_speculative_tokens": n} for n in (1, 3, 5)},
    **{
        name: {"method": "adaptive_tree", "num_speculative_tokens": NODES, "tree": {"cost_profile": None, **options}}
        for name, options in (("adaptive_tree", {}), ("adaptive_tree, no look-up", {"lookup": None}))
    },
}


class Row(NamedTuple):
    requests: int
    temperature: float

    @property
    def starts(self) -> int:
        """Number of cold starts."""
        return max(1, COLD_TOKENS // (COLD * self.requests))

    @property
    def turns(self) -> list[str]:
        """Whether each turn after another is cold or warm; a cold start begins with the first of its turns."""
        warm = min(max(WARM_TOKENS // self.requests, WARM[0]), WARM[1])
        return ["cold"] * (self.starts * COLD // TURN) + ["warm"] * (warm // TURN)


class Turn(NamedTuple):
    tokens: int
    seconds: float
    steps: int


class Engine:
    """One configuration, in this process."""

    def __init__(self, options: argparse.Namespace):
        from benchmarks.tokens_per_step import start

        spec = CONFIGURATIONS[options.cell]
        spec = spec and {**spec, "model": options.head}
        self.llm = start(spec, options.model, options.dtype, seats=16, eager=options.eager, tokens=512)
        repair_sampling()
        texts = humaneval(options.humaneval, 48) + held_out(options.chat, 48)
        self.questions = list(chat_prompts(options.model, texts))
        random.Random(0).shuffle(self.questions)
        self.forget = as_started(self.llm) if spec and "tree" in spec else lambda: None

    def turns(self, row: Row) -> Iterator[Turn]:
        """Turns of a row, one after the other."""
        from vllm import SamplingParams

        engine, questions = self.llm.llm_engine, cycle(self.questions)
        params = SamplingParams(temperature=row.temperature, max_tokens=192)
        lengths: dict[str, int] = {}
        started, total, reads = 0, 0, True
        for number in range(1, 1 + len(row.turns)):
            if number <= row.starts * COLD // TURN and (number - 1) % (COLD // TURN) == 0:
                self.forget()
            timed = Turn(0, 0.0, 0)
            while total < number * TURN * row.requests:
                while len(lengths) < row.requests:
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
                    timed = Turn(timed.tokens + tokens, timed.seconds + seconds, timed.steps + 1)
                total += tokens
                reads = 0 in lengths.values()  # a chunked prompt
            yield timed
        engine.abort_request(list(lengths))
        while engine.has_unfinished_requests():
            engine.step()


def as_started(llm: Any) -> Callable[[], None]:
    """A function that lets a tree method know no more than it does now."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    known = deepcopy((runner.budget.budget, runner.budget.temperature)), deepcopy(runner.steering.to_json())

    def forget() -> None:
        budget, steering = deepcopy(known)
        runner.budget.budget, runner.budget.temperature = budget
        runner.steering.restore(steering)

    return forget


def serve(options: argparse.Namespace) -> None:
    """Read the rows from the standard input, and write each turn when a line asks for it."""
    engine = Engine(options)
    print("[]", flush=True)
    for line in sys.stdin:
        for turn in engine.turns(Row(*json.loads(line))):
            print(json.dumps(turn), flush=True)
            sys.stdin.readline()


class Process:
    """A process of one configuration; `module`: the script that it runs, with the same `options`."""

    def __init__(self, options: argparse.Namespace, name: str, module: str, passed: tuple[str, ...] = ()):
        same = ("model", "head", "humaneval", "chat", "dtype", *passed)
        command = [sys.executable, "-m", module, *(f"--{key}={getattr(options, key)}" for key in same)]
        command.append(f"--cell={name}")
        clock = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        command += ["--eager"] * getattr(options, "eager", False)
        self.name, pipe = name, subprocess.PIPE
        self.run = subprocess.Popen(command, env={**os.environ, **clock}, stdin=pipe, stdout=pipe, text=True)

    def answer(self) -> Any:
        assert self.run.stdout is not None
        for line in self.run.stdout:
            if line.startswith("["):
                return json.loads(line)
        raise RuntimeError(f"the process of {self.name} has ended: see above")

    def ask(self, line: str = "") -> None:
        assert self.run.stdin is not None
        self.run.stdin.write(f"{line}\n")
        self.run.stdin.flush()


def measured(processes: list[Process], row: Row) -> dict[str, list[Turn]]:
    """Turns of each configuration, taken one after the other."""
    found: dict[str, list[Turn]] = {process.name: [] for process in processes}
    for number in range(len(row.turns)):
        for process in processes:
            process.ask("" if number else json.dumps(row))
            found[process.name].append(Turn(*process.answer()))
    for process in processes:
        process.ask()
    return found


def figures(turns: list[Turn], plain: list[Turn]) -> dict[str, float]:
    """Tokens per second and per step, and the rate relative to that of `plain`, with a 90 % interval."""
    own, other = np.array(turns), np.array(plain)
    chosen = np.random.default_rng(0).integers(len(own), size=(2000, len(own)))

    def rate(which: np.ndarray) -> np.ndarray:
        tokens, seconds, _ = which.sum(-2).T
        return np.asarray(tokens / seconds)

    low, high = np.quantile(rate(own[chosen]) / rate(other[chosen]), [0.05, 0.95])
    tokens, seconds, steps = own.sum(0)
    ratio = float(rate(own) / rate(other))
    return {"rate": tokens / seconds, "tokens_per_step": tokens / steps, "ratio": ratio, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--head", help="folder of an EAGLE-3 head for it (default: the bundled one)")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, required=True, help="held_out.json of examples/chat_texts.py")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="run without compilation")
    parser.add_argument("--only", nargs="+", default=[""], help="configurations whose names contain one of these")
    parser.add_argument("--cell", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    options.head = options.head or SMOLLM2_HEAD
    options.model = options.model or fetch("smollm2", cache_folder() / "models", say=print).folder
    if options.cell:
        serve(options)
        return
    os.environ.setdefault("VLLM_CACHE_ROOT", tempfile.mkdtemp())  # of what is compiled
    names = [name for name in CONFIGURATIONS if name == PLAIN or any(part in name for part in options.only)]
    processes, rows = list[Process](), list[dict[str, Any]]()
    for name in names:
        processes.append(Process(options, name, "benchmarks.smollm2_speed"))
        processes[-1].answer()  # it has started
    for row in starmap(Row, product(options.requests, options.temperatures)):
        found = measured(processes, row)
        for name, turns in found.items():
            cell: dict[str, Any] = {"configuration": name, **row._asdict()}
            for part in ("cold", "warm"):
                its = [kind == part for kind in row.turns]
                cell[part] = figures(list(compress(turns, its)), list(compress(found[PLAIN], its)))
            rows.append(cell)
            print(rows[-1], flush=True)
        if options.out:
            save(options.out, rows)
    for process in processes:
        process.run.kill()


if __name__ == "__main__":
    main()
