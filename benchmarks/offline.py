"""An offline batch: `LLM.generate` of 256 prompts on SmolLM2-135M-Instruct, beside no speculation and vLLM's chain.

    python -m benchmarks.offline --humaneval HumanEval.jsonl.gz --chat texts/held_out.json \\
        --out benchmarks/results/offline.json

HumanEval's questions and the model's own, as many tokens of each whatever ends earlier, as many requests at once as
there are prompts. Each configuration is a process with one thread, compiled as vLLM compiles by default; they take
turns at the whole batch, the first from a cold start. The clock is the process's CPU time; run nothing beside it all
the same.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import held_out, humaneval
from benchmarks.smollm2_speed import CONFIGURATIONS, PLAIN, Process
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
from vllm_adaptive_tree.bench.provenance import save

NAMES = PLAIN, "vLLM's chain of 1", "adaptive_tree"


def serve(options: argparse.Namespace) -> None:
    """Decode the batch each time a line asks for it, and write tokens, and seconds of the process and of the clock."""
    from vllm import SamplingParams

    from benchmarks.tokens_per_step import start

    spec = CONFIGURATIONS[options.cell]
    llm = start(
        spec and {**spec, "model": options.head}, options.model, options.dtype, seats=options.prompts, eager=False
    )
    questions = humaneval(options.humaneval, options.prompts - options.prompts // 3)
    questions += held_out(options.chat, options.prompts - len(questions))
    texts = list(chat_prompts(options.model, questions))
    print("[]", flush=True)
    for line in sys.stdin:
        whole: dict[str, Any] = {"max_tokens": options.tokens, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(temperature=json.loads(line), **whole)
        before = time.process_time(), time.perf_counter()
        outputs = llm.generate(texts, params, use_tqdm=False)
        seconds = time.process_time() - before[0], time.perf_counter() - before[1]
        print(json.dumps([sum(len(one.outputs[0].token_ids) for one in outputs), *seconds]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--head", default=SMOLLM2_HEAD, help="folder of an EAGLE-3 head (default: the bundled one)")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, required=True, help="held_out.json of examples/chat_texts.py")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--dtype", default="float32", help="of target and draft (default: %(default)s)")
    parser.add_argument("--cell", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    options.model = options.model or fetch("smollm2", cache_folder() / "models", say=print).folder
    if options.cell:
        serve(options)
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # 256 requests at once
    os.environ.setdefault("VLLM_CACHE_ROOT", tempfile.mkdtemp())  # of what is compiled
    processes = list[Process]()
    for name in NAMES:
        processes.append(Process(options, name, "benchmarks.offline", ("prompts", "tokens")))
        processes[-1].answer()  # it has started
    rows = list[dict[str, Any]]()
    for temperature, number in product(options.temperatures, range(options.rounds)):
        plain = 0.0
        for process in processes:
            process.ask(json.dumps(temperature))
            tokens, own, wall = process.answer()
            plain = plain or tokens / own  # the first is without speculation
            cell = {"configuration": process.name, "temperature": temperature, "round": number, "tokens": tokens}
            rows.append({**cell, "rate": tokens / own, "wall_rate": tokens / wall, "ratio": tokens / own / plain})
            print(rows[-1], flush=True)
        if options.out:
            save(options.out, rows)
    for process in processes:
        process.run.kill()


if __name__ == "__main__":
    main()
