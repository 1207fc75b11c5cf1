"""Tokens per step of OPT-Tree over node budgets and draft temperatures, beside vLLM's own chains.

    python -m benchmarks.tokens_per_step --out benchmarks/results/tokens_per_step.json

Greedy, float32, on the bundled pair and the modules held out from its training, `threshold: 0` and
`max_depth: min(N, 16)`; every row decodes the same prompts, 128 tokens each. It measures acceptance, not speed.
"""

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm_adaptive_tree
from benchmarks.datasets import read_prompts
from examples.train_demo_pair import documents, is_held_out
from vllm_adaptive_tree.bench.provenance import save

PAIR = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"
BATCH, PROMPT_CHARACTERS, NEW_TOKENS = 16, 300, 128
FIRST = 200
"""Steps in which a learning method has seen little."""
SEEDS = "none", "default", "reproducible"
"""A request's seed: without one; one that asks for vLLM's own samples; one that keys the draws of the rule."""


def prompts(count: int, file: Path | None = None) -> list[str]:
    """The first prompts of a file that `datasets` reads; else beginnings and middles of held-out modules."""
    if file is not None:
        return read_prompts(file)[:count]
    starts = [eighth / 8 for eighth in range(8)]
    found = [t[int(s * len(t)) :][:PROMPT_CHARACTERS] for s in starts for t in _held_out()]
    return found[:count]


def files(count: int) -> list[int]:
    """Index of the module of each of the `prompts`."""
    modules = len(_held_out())
    return [number % modules for number in range(min(count, 8 * modules))]


def _held_out() -> list[str]:
    return [text for name, text in sorted(documents().items()) if is_held_out(name) and len(text) > 2000]


def start(
    spec: dict[str, Any] | None,
    target: Path = PAIR / "target",
    dtype: str = "float32",
    *,
    seats: int = BATCH,
    eager: bool = True,
    tokens: int | None = None,
) -> Any:
    """An engine in this process; `tokens`: most of a step, as vLLM has it if None."""
    from vllm import LLM

    return LLM(
        str(target),
        speculative_config=spec,
        dtype=dtype,
        enforce_eager=eager,
        max_model_len=1024,
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )


def measure(
    llm: Any, texts: list[str], temperatures: Sequence[float] = (0.0,), top_p: float = 1.0, seeds: str = "none"
) -> dict[str, Any]:
    """Decode `texts` in rounds of BATCH, at each of the temperatures in turn; `seeds`: one of SEEDS.

    Returns:
        tokens_per_step, its spread (the standard deviation over the rounds), nodes_per_step and steps of all; first:
        tokens per step of the first FIRST; by_prompt: tokens per step of each, those after the last left out.

    Raises:
        VLLMValidationError: the engine refuses `seeds`.
    """
    from vllm import SamplingParams

    def counts() -> dict[str, float]:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        return {name: found.get(f"vllm:spec_decode_{name}", 0.0) for name in names}

    def params(at: int) -> Any:
        return SamplingParams(
            temperature=temperatures[at % BATCH % len(temperatures)],
            top_p=top_p,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            seed=None if seeds == "none" else at,
            extra_args={"tree": {"seed": seeds}} if seeds == "reproducible" else None,
        )

    rounds, before, first, by_prompt = [], counts(), list[int](), list[float]()
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        steps = list(decode(llm, [(text, params(start + at)) for at, text in enumerate(part)]))
        first += [tokens for _, tokens in steps][: FIRST - len(first)]
        number = Counter(at for at, _ in steps)
        by_prompt += [(NEW_TOKENS - 1) / number[at] for at in range(len(part))]
        after = counts()
        rounds.append({name: after[name] - before[name] for name in after})
        before = after
    total = {name: sum(r[name] for r in rounds) for name in rounds[0]}
    each = [1 + r["num_accepted_tokens"] / r["num_drafts"] for r in rounds]
    return {
        "tokens_per_step": 1 + total["num_accepted_tokens"] / total["num_drafts"],
        "spread": statistics.stdev(each) if len(each) > 1 else 0.0,
        "nodes_per_step": total["num_draft_tokens"] / total["num_drafts"],
        "steps": total["num_drafts"],
        "first": statistics.mean(first),
        "by_prompt": [round(rate, 3) for rate in by_prompt],
    }


def decode(llm: Any, requests: list[tuple[str, Any]]) -> Iterator[tuple[int, int]]:
    """Decode one batch; yields the request and the number of tokens of each step, but for those that end prompts."""
    engine, length = llm.llm_engine, dict[str, int]()
    for at, (text, params) in enumerate(requests):
        engine.add_request(str(at), text, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, tokens = output.request_id.partition("-")[0], len(output.outputs[0].token_ids)
            if name in length:
                yield int(name), tokens - length[name]
            length[name] = tokens


def measured(spec: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    llm = start(spec)
    found = measure(llm, texts)
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 12, 25, 60])
    parser.add_argument("--temperatures", nargs="+", default=["1", "0.7", "0.5", "auto"])
    parser.add_argument("--chains", type=int, nargs="+", default=[4, 5, 8, 12])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draft, texts = str(PAIR / "draft"), prompts(options.prompts)

    rows: list[dict[str, Any]] = []
    for length in options.chains:
        spec = {"method": "draft_model", "model": draft, "num_speculative_tokens": length}
        rows.append({"method": "chain", "nodes": length, **measured(spec, texts)})
        print(rows[-1], flush=True)
    for temperature in options.temperatures:
        for nodes in options.nodes:
            tree = {
                "budget": None,
                "threshold": 0,
                "max_depth": min(nodes, 16),
                "draft_temperature": temperature if temperature == "auto" else float(temperature),
            }
            spec = {"method": "opt_tree", "model": draft, "num_speculative_tokens": nodes, "tree": tree}
            row = {"method": "opt_tree", "nodes": nodes, "draft_temperature": temperature}
            rows.append({**row, **measured(spec, texts)})
            print(rows[-1], flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        save(options.out, rows)


if __name__ == "__main__":
    main()
