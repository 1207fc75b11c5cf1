"""`vllm bench serve` against servers of SmolLM2-135M-Instruct: vLLM's chains and tree methods, by numbers of clients.

    python -m benchmarks.serve --chat texts/held_out.json --humaneval HumanEval.jsonl.gz \\
        --out benchmarks/results/serve.json

The client is vLLM's own (`vllm bench serve`, dataset `custom`, streamed), a server is `vllm serve` as a user starts it,
in bfloat16 and compiled; without AVX-512 ask for float32. Questions are HumanEval's and those that
`examples/chat_texts.py` has held out, in the model's chat template, each for as long as the model answers, at most
`--tokens`, at T = 0. All servers live side by side, and the client goes from one to the next with the same questions,
so that a machine that drifts drifts for all of them. No question comes twice: with an EAGLE head vLLM finds a block
less of it in its prefix cache than without. The first round of each number of clients is a warm-up and does not count.
Run nothing beside it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import held_out, humaneval
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.provenance import save

REQUESTS, ROUNDS = {1: 4, 4: 12, 16: 32}, 4
"""Clients -> requests of a round; rounds of each number of clients, a warm-up first."""
SEATS, NODES = 16, 16
PLAIN = "no speculation"


def configurations(head: str) -> dict[str, dict[str, Any] | None]:
    """Name -> speculative_config."""

    def tree(model: str) -> dict[str, Any]:
        learnt = {"cost_profile": None}  # nothing, before the round
        return {"method": "adaptive_tree", "model": model, "num_speculative_tokens": NODES, "tree": learnt}

    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    return {
        PLAIN: None,
        "chain of 3": {"method": "eagle3", "model": head, "num_speculative_tokens": 3},
        "adaptive_tree": tree(head),
        "ngram chain of 5": {**ngram, "num_speculative_tokens": 5},
        "adaptive_tree, ngram": tree("ngram"),
    }


@contextlib.contextmanager
def serving(target: str, spec: dict[str, Any] | None, dtype: str, log: Path) -> Iterator[str]:
    """Address of a healthy server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", "1024", "--served-model-name", "demo"]
    command += ["--max-num-seqs", str(SEATS)]
    if spec is not None:
        command += ["--speculative-config", json.dumps(spec), "--per-request-spec-decode-metrics", "summary"]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # the default of `vllm serve`
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(600):
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.5)
            else:
                raise RuntimeError("the server is not healthy after five minutes")
            yield url
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def bench(url: str, target: str, dataset: Path, clients: int, tokens: int) -> dict[str, Any]:
    """Result of one round of `vllm bench serve --save-detailed`."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    given = ["--base-url", url, "--model", "demo", "--tokenizer", target, "--dataset-name", "custom"]
    given += ["--dataset-path", str(dataset), "--custom-output-len", str(tokens), "--skip-chat-template"]
    given += ["--num-prompts", str(REQUESTS[clients]), "--max-concurrency", str(clients), "--temperature", "0"]
    given += ["--disable-tqdm", "--disable-shuffle", "--save-detailed"]
    with contextlib.redirect_stdout(None):
        return asyncio.run(main_async(parser.parse_args(given)))


def row(name: str, clients: int, rounds: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all rounds, and the throughput of each relative to that of `plain` beside it."""

    def per_second(rounds: list[dict[str, Any]]) -> float:
        return sum(one["total_output_tokens"] for one in rounds) / sum(one["duration"] for one in rounds)

    drafts = sum(one.get("spec_decode_num_drafts") or 0 for one in rounds)
    accepted = sum(one.get("spec_decode_accepted_tokens") or 0 for one in rounds)
    texts = zip(*([text for one in those for text in one["generated_texts"]] for those in (rounds, plain)), strict=True)
    return {
        "row": name,
        "clients": clients,
        "output_throughput": per_second(rounds),
        "ratio": per_second(rounds) / per_second(plain),
        "ratios": [per_second([one]) / per_second([other]) for one, other in zip(rounds, plain, strict=True)],
        **{key: statistics.fmean(one[key] for one in rounds) for key in ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms")},
        "tokens_per_draft": 1 + accepted / drafts if drafts else None,
        "failed": sum(one["failed"] for one in rounds),
        "texts": sum(len(one["generated_texts"]) for one in rounds),
        "same_texts": sum(one == other for one, other in texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, help="held_out.json of examples/chat_texts.py (default: HumanEval alone)")
    parser.add_argument("--clients", type=int, nargs="+", choices=REQUESTS, default=[*REQUESTS])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names contain one of these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    model = str(options.model or fetch("smollm2", cache_folder() / "models", say=print).folder)
    chat = held_out(options.chat, 48) if options.chat else []
    texts = list(chat_prompts(Path(model), humaneval(options.humaneval, 164) + chat))
    random.Random(0).shuffle(texts)
    questions, found = iter(texts), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls = {
            name: stack.enter_context(serving(model, spec, options.dtype, Path(folder, name)))
            for name, spec in configurations(SMOLLM2_HEAD).items()
            if name == PLAIN or any(part in name for part in options.only)
        }
        for clients in options.clients:
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
            for number in range(ROUNDS):
                dataset = Path(folder, f"{number}.jsonl")
                chosen = islice(questions, REQUESTS[clients])
                dataset.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen))
                for name, url in urls.items():
                    rounds[name].append(bench(url, model, dataset, clients, options.tokens))
            for name in urls:
                found.append(row(name, clients, rounds[name][1:], rounds[PLAIN][1:]))
                print(json.dumps(found[-1]), flush=True)
            if options.out:
                save(options.out, found)


if __name__ == "__main__":
    main()
