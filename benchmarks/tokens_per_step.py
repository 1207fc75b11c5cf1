"""Tokens per step of OPT-Tree over node budgets and draft temperatures, beside vLLM's own chains.

    python -m benchmarks.tokens_per_step --out benchmarks/results/tokens_per_step.json

Greedy, float32, on the bundled pair and the modules held out from its training, `threshold: 0` and
`max_depth: min(N, 16)`; every row decodes the same prompts, 128 tokens each. It measures acceptance, not speed.
"""

import argparse
import os
import statistics
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


def start(spec: dict[str, Any] | None, target: Path = PAIR / "target", dtype: str = "float32") -> Any:
    from vllm import LLM

    return LLM(
        str(target),
        speculative_config=spec,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )


def measure(llm: Any, texts: list[str], temperature: float = 0.0) -> dict[str, float]:
    """Decode `texts` in rounds of BATCH; the spread is the standard deviation over the rounds."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True)

    def counts() -> dict[str, float]:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        return {name: found.get(f"vllm:spec_decode_{name}", 0.0) for name in names}

    rounds, before = [], counts()
    for first in range(0, len(texts), BATCH):
        llm.generate(texts[first : first + BATCH], params, use_tqdm=False)
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
    }


def measured(spec: dict[str, Any], texts: list[str]) -> dict[str, float]:
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
