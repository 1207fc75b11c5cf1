"""Tokens per step of every lossless pair of proposer and acceptance rule, at T = 0, 0.6 and 1.

    python -m benchmarks.pairs --out benchmarks/results/pairs.json
    python -m benchmarks.pairs --methods --nodes 8 24 60 --temperatures 0 0.3 0.6 0.8 1 --out FILE
    python -m benchmarks.pairs --methods adaptive_tree sequoia --nodes 24 --temperatures 1 \\
        --seeds none default reproducible --out FILE
    python -m benchmarks.pairs --methods --model TARGET --draft DRAFT --data question.jsonl --prompts 80 --out FILE

The second form compares methods, each with the rule of `auto`; `--top-p 0.95` cuts the target's distribution, `--vector
FILE` adds Sequoia with a vector of `vllm-adaptive-tree calibrate`, `--mixed` a row of batches whose requests have the
temperatures in turns. The third is the price of a seed; what is refused has no row. The fourth repeats a paper's row on
its own data (MT-Bench, GSM8K, HumanEval or SPEED-Bench: `datasets.py`), with your models.

Float32, on the bundled pair and the modules held out from its training. It measures acceptance, not speed. Rows are
saved as they come; a run resumes where the last one ended.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import PAIR, SEEDS, measure, prompts, start
from vllm_adaptive_tree.bench.provenance import save

TEMPERATURES = (0.0, 0.6, 1.0)
SAMPLED = (
    ("top_k", "target_only"),
    ("without_replacement", "target_only"),
    ("without_replacement", "rrsw"),
    ("without_replacement", "traversal"),
    ("iid", "rrs"),
    ("iid", "k_seq"),
    ("iid", "traversal"),
    (None, "greedy_multi_draft"),
)


def shaped(shape: str, children: str | None) -> dict[str, Any]:
    return {"shape": shape} if children is None else {"shape": shape, "children": children}


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("opt_tree", {"threshold": 0}, "target_only"),
    ("eagle2", {}, "target_only"),
    *[("dyspec", {"mode": "heap"}, rule) for rule in ("target_only", "rrsw", "traversal")],
    *[("static_tree", shaped("binary", children), rule) for children, rule in SAMPLED],
    ("static_tree", shaped("binary", None), "spechub"),
    *[("static_tree", shaped("ternary", children), rule) for children, rule in SAMPLED],
    *[("static_tree", shaped("eagle1", children), rule) for children, rule in SAMPLED],
]
METHODS: list[tuple[str, dict[str, Any], str]] = [
    ("adaptive_tree", {}, "auto"),
    ("adaptive_tree", {"lookup": None}, "auto"),
    ("opt_tree", {}, "auto"),
    ("opt_tree", {"threshold": 0}, "auto"),
    ("dyspec", {}, "auto"),
    ("sequoia", {}, "auto"),
]
"""`adaptive_tree` begins with a table that has seen nothing."""


def main() -> None:
    from vllm.exceptions import VLLMValidationError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[14], help="a binary tree of three levels has 14")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", metavar="NAME", help="each method, or these, with its own rule")
    parser.add_argument(
        "--model", type=Path, default=PAIR / "target", metavar="FOLDER", help="default: the bundled one"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompts; default: modules of the standard library")
    parser.add_argument("--draft", default=str(PAIR / "draft"), metavar="FOLDER", help="default: the bundled model")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seeds", nargs="+", choices=SEEDS, default=["none"])
    parser.add_argument("--mixed", action="store_true", help="also batches of all temperatures")
    parser.add_argument("--vector", metavar="FILE", help="Sequoia with this one too")
    options = parser.parse_args()
    texts = prompts(options.prompts, options.data)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    vector = [("sequoia", {"vector": options.vector}, "auto")] if options.vector else []
    chosen = [one for one in [*METHODS, *vector] if not options.methods or one[0] in options.methods]
    laws: list[dict[str, Any]] = [{"temperature": temperature} for temperature in options.temperatures]
    laws += [{"temperatures": options.temperatures}] * options.mixed
    for nodes, (method, tree, rule) in product(options.nodes, CONFIGS if options.methods is None else chosen):
        key = {"method": method, "tree": tree, "rule": rule, "nodes": nodes}
        named = [{**key, **law, "top_p": options.top_p, "seeds": one} for law, one in product(laws, options.seeds)]
        left = [one for one in named if not any(one.items() <= row.items() for row in rows)]
        if not left:
            continue
        spec = {"model": options.draft, "num_speculative_tokens": nodes, "rejection_sample_method": rule}
        llm = start({**spec, "method": method, "tree": {**tree, "budget": None}}, options.model)
        for one in left:
            temperatures = one.get("temperatures", [one.get("temperature")])
            try:
                found = measure(llm, texts, temperatures, options.top_p, one["seeds"])
            except VLLMValidationError as refusal:
                print(refusal, flush=True)
                continue
            rows.append({**one, **found})
            print(rows[-1], flush=True)
            save(options.out, rows)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
