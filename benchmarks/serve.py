"""`vllm bench serve` against a server of every method, at several numbers of clients.

    python -m benchmarks.serve --out benchmarks/results/serve.json

The client is vLLM's own (`vllm bench serve`, dataset `custom`, streamed), the server is `vllm serve` with the default
`budget: "auto"` and `--per-request-spec-decode-metrics summary`. The target is the bundled one, enlarged (bfloat16),
since a step of the small one costs almost nothing. Servers run one after another: plain vLLM runs first and last, and
the difference of the two shows the drift of the machine. The fastest round counts. At T = 0 the texts of one client are
compared with plain vLLM's: in bfloat16 near ties may fall either way.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import PAIR, prompts
from vllm_adaptive_tree.bench.models import enlarge
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.cli.arguments import parameters
from vllm_adaptive_tree.proposers import METHODS

DRAFT = str(PAIR / "draft")
REQUESTS = {1: 8, 8: 24, 32: 64}
"""Clients -> requests of a round."""


def configurations(nodes: int) -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {"no speculation": None}
    found["chain of 3"] = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
    for method in METHODS:
        found[method] = {"method": method, "model": DRAFT, "num_speculative_tokens": nodes}
    head = {"method": "opt_tree", "model": str(PAIR / "head"), "num_speculative_tokens": nodes}
    return found | {"opt_tree, EAGLE-3 head": head, "no speculation, again": None}


@contextlib.contextmanager
def serving(target: str, spec: dict[str, Any] | None, log: Path) -> Iterator[str]:
    """Address of a healthy server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "32"]
    command += ["--enforce-eager", "--served-model-name", "demo"]
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


def bench(url: str, target: str, dataset: Path, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """Result of one round of `vllm bench serve --save-detailed`."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    given = ["--base-url", url, "--model", "demo", "--tokenizer", target, "--dataset-name", "custom"]
    given += ["--dataset-path", str(dataset), "--custom-output-len", str(tokens), "--skip-chat-template"]
    given += ["--num-prompts", str(requests), "--max-concurrency", str(clients), "--temperature", "0"]
    given += ["--ignore-eos", "--disable-tqdm", "--disable-shuffle", "--save-detailed"]
    with contextlib.redirect_stdout(None):
        return asyncio.run(main_async(parser.parse_args(given)))


def own_acceptance(url: str, prompt: str, tokens: int) -> dict[str, Any] | None:
    """Metrics that the server returns with one request: `--per-request-spec-decode-metrics`."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return (found.get("metrics") or {}).get("speculative_decoding")


def row(name: str, clients: int, each: list[dict[str, Any]]) -> dict[str, Any]:
    best = max(each, key=lambda one: one["output_throughput"])
    keys = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
    spec = [key for key in best if key.startswith("spec_decode_")]
    return {"row": name, "clients": clients} | {key: best.get(key) for key in (*keys, *spec, "completed", "failed")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--enlarge-to", type=parameters, default="150M", help="parameters of the target")
    parser.add_argument("--clients", type=int, nargs="+", choices=REQUESTS, default=[*REQUESTS])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found, texts = list[dict[str, Any]](), prompts(max(REQUESTS.values()))
    with tempfile.TemporaryDirectory() as folder:
        target, dataset = str(Path(folder, "target")), Path(folder, "prompts.jsonl")
        enlarge(PAIR / "target", Path(target), options.enlarge_to)
        dataset.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        reference: list[str] = []
        for name, spec in configurations(options.nodes).items():
            if options.only not in name:
                continue
            with serving(target, spec, Path(folder, "log")) as url:
                for clients in options.clients:
                    count = REQUESTS[clients]
                    bench(url, target, dataset, clients, count // 2, options.tokens)  # warm: the budget learns
                    each = [bench(url, target, dataset, clients, count, options.tokens) for _ in range(options.rounds)]
                    one = row(name, clients, each)
                    if clients == 1:
                        reference = reference or each[0]["generated_texts"]
                        one["same_texts"] = sum(map(str.__eq__, reference, each[0]["generated_texts"]))
                        one["metrics_of_a_request"] = own_acceptance(url, texts[0], options.tokens)
                    found.append(one)
                    print(json.dumps(one), flush=True)
    if options.out:
        save(options.out, found)


if __name__ == "__main__":
    main()
