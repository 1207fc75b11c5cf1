"""What a step costs the host where the draft rests, beyond vLLM: the bundled pair, Model Runner V1, one thread.

    python -m benchmarks.resting --out benchmarks/results/resting.json

Each cell is a process: requests of a short text each, float32, eager, 100 tokens. The planner is told that a draft
level takes ten seconds and that a row costs what a token does, so drafts rest and look-ups do not pay. Counted is the
processor time of the engine's thread outside of the target's forward and its logits, in ms a step; the least of the
rounds. `draft`: of that, the worker's call that drafts. vLLM's own n-gram chain is asked for matches longer than any
text: what vLLM takes to speculate, drafting nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.environment import PAIR
from vllm_adaptive_tree.bench.provenance import save

TOKENS, ROUNDS = 100, 4
CHAIN = "vLLM's n-gram chain"
DRAFTS = {"no speculation": None, CHAIN: None, "EAGLE-3 head": PAIR / "head", "model": PAIR / "draft", "ngram": "ngram"}
REQUESTS = 1, 8, 32


def resting_planner(runner: Any) -> Any:
    """A planner that has these costs whatever it hears."""
    from vllm_adaptive_tree.budget import Costs, Planner

    class Resting(Planner):
        def observe_step(self, *_: Any, **__: Any) -> None:
            pass

    verify, level = {"rows": [1, 1000], "seconds": [0.05, 50.0]}, {"rows": [1, 1000], "seconds": [10.0, 10.0]}
    costs = Costs.from_json({"verify": verify, "draft": level, "context": 0.0})
    return Resting(costs, sampled=runner.cuts_sampled)


def timed(seconds: dict[str, float], owner: Any, name: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **given: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*args, **given)
        finally:
            seconds[name] += time.thread_time() - started

    setattr(owner, name, call)


def measure(name: str, requests: int) -> dict[str, float]:
    """ms of a step: of the host in all, and of its drafting."""
    from vllm import LLM, SamplingParams

    draft = DRAFTS[name]
    speculation: dict[str, Any] | None = None
    if draft is not None:
        speculation = {"method": "adaptive_tree", "model": str(draft), "tree": {"cost_profile": None}}
    elif name == CHAIN:
        speculation = {"method": "ngram", "prompt_lookup_min": 400, "prompt_lookup_max": 400}
    if speculation is not None:
        speculation["num_speculative_tokens"] = 16
    llm = LLM(
        str(PAIR / "target"),
        speculative_config=speculation,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=requests,
        enforce_eager=True,
        disable_log_stats=False,
    )
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    if draft is not None:
        runner.begin_budget(resting_planner(runner))
    texts = [f"def f{number}(a, b):\n    return {number} *" for number in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    seconds = defaultdict[str, float](float)
    for owner, function in (
        (llm.llm_engine, "step"),
        (runner, "_model_forward"),
        (runner.model, "compute_logits"),
        (runner, "propose_draft_token_ids"),
    ):
        timed(seconds, owner, function)
    rows = list[dict[str, float]]()
    for _ in range(1 + ROUNDS):
        seconds.clear()
        llm.generate(texts, params, use_tqdm=False)
        host = seconds["step"] - seconds["_model_forward"] - seconds["compute_logits"]
        rows.append({"host": 1e3 * host / TOKENS, "draft": 1e3 * seconds["propose_draft_token_ids"] / TOKENS})
    return {key: round(min(row[key] for row in rows[1:]), 2) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.cell:
        print("CELL" + json.dumps(measure(options.cell[0], int(options.cell[1]))))
        return
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    rows = list[dict[str, Any]]()
    for requests in REQUESTS:
        for name in DRAFTS:
            command = [sys.executable, "-m", "benchmarks.resting", "--cell", name, str(requests)]
            run = subprocess.run(
                command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
            )
            (line,) = [line for line in run.stdout.splitlines() if line.startswith("CELL")]
            rows.append({"draft": name, "requests": requests, "ms": json.loads(line.removeprefix("CELL"))})
            print(rows[-1], flush=True)
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
