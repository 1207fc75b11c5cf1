"""Seconds of `LLM.generate` for 256 prompts at once on SmolLM2-135M-Instruct, beside vLLM's chains.

    python -m benchmarks.offline_batch --chat texts/held_out.json --humaneval HumanEval.jsonl.gz \\
        --out benchmarks/results/offline_batch.json

Each row is a process of its own that starts an engine as `LLM(...)` does, with room for all prompts, reads one batch of
other prompts and is timed on this one: prompts and answers of at most 64 tokens, which end where the model ends them.
Wall-clock time: run nothing beside it. Rounds go over all rows in turn; the ratio is of their totals.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import held_out, humaneval
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.provenance import save

PROMPTS, NEW_TOKENS = 256, 64
CONFIGURATIONS = {
    "no speculation": None,
    **{f"vLLM's chain of {n}": {"method": "eagle3", "num_speculative_tokens": n} for n in (1, 3)},
    "adaptive_tree": {"method": "adaptive_tree", "num_speculative_tokens": 16},
}


def cell(options: argparse.Namespace) -> dict[str, Any]:
    """One row of one round, in this process."""
    from vllm import LLM, SamplingParams

    spec = CONFIGURATIONS[options.cell]
    llm = LLM(
        str(options.model),
        speculative_config=spec and {**spec, "model": options.head},
        dtype=options.dtype,
        max_model_len=1024,
        max_num_seqs=PROMPTS,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    questions = humaneval(options.humaneval, 164) + held_out(options.chat, PROMPTS)
    prompts = list(islice(cycle(chat_prompts(options.model, questions)), PROMPTS + 16))
    params = SamplingParams(temperature=options.temperature, max_tokens=NEW_TOKENS)
    llm.generate(prompts[PROMPTS:], params, use_tqdm=False)
    before = time.perf_counter()
    outputs = llm.generate(prompts[:PROMPTS], params, use_tqdm=False)
    seconds = time.perf_counter() - before
    return {"seconds": seconds, "tokens": sum(len(one.outputs[0].token_ids) for one in outputs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--head", help="folder of an EAGLE-3 head for it (default: the bundled one)")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, required=True, help="held_out.json of examples/chat_texts.py")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
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
    rows: dict[str, dict[str, Any]] = {name: {"configuration": name, "runs": []} for name in CONFIGURATIONS}
    for _ in range(options.rounds):
        for name, row in rows.items():
            row["runs"].append(_in_a_process(options, name))
            row["rate"] = sum(run["tokens"] for run in row["runs"]) / sum(run["seconds"] for run in row["runs"])
            print(row, flush=True)
            if options.out:
                save(options.out, [row for row in rows.values() if row["runs"]])


def _in_a_process(options: argparse.Namespace, name: str) -> dict[str, Any]:
    same = ("model", "head", "humaneval", "chat", "temperature", "dtype")
    command = [sys.executable, "-m", "benchmarks.offline_batch", f"--cell={name}"]
    command += [f"--{option}={getattr(options, option)}" for option in same]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "VLLM_CACHE_ROOT": cache}
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
