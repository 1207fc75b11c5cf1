"""Tokens per step of every lossless pair of proposer and acceptance rule, at T = 0, 0.6 and 1.

    python -m benchmarks.pairs --out benchmarks/results/pairs.json
    python -m benchmarks.pairs --methods --nodes 24 --temperatures 0 0.3 0.6 0.8 1 --out benchmarks/results/methods.json
    python -m benchmarks.pairs --methods --model TARGET --draft DRAFT --data question.jsonl --prompts 80 --out FILE

The second form compares methods, each with the rule of `auto`; the third repeats a paper's row on its own data
(MT-Bench, GSM8K, HumanEval or SPEED-Bench: `datasets.py`), with your models.

Float32, on the bundled pair and the modules held out from its training, without seeds (a seeded request is walked with
`target_only`). It measures acceptance, not speed. Rows are saved as they come; a run resumes where the last one ended.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import PAIR, measure, prompts, start
from vllm_adaptive_tree.bench.provenance import save

TEMPERATURES = (0.0, 0.6, 1.0)
BINARY, TERNARY = {"shape": "binary"}, {"shape": "ternary"}
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
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("opt_tree", {"threshold": 0}, "target_only"),
    ("eagle2", {}, "target_only"),
    *[("dyspec", {"mode": "heap"}, rule) for rule in ("target_only", "rrsw", "traversal")],
    *[("static_tree", {**BINARY, "children": children}, rule) for children, rule in SAMPLED],
    ("static_tree", BINARY, "spechub"),
    *[("static_tree", {**TERNARY, "children": children}, rule) for children, rule in SAMPLED],
    *[("static_tree", {"shape": "eagle1", "children": children}, rule) for children, rule in SAMPLED],
]

METHODS: list[tuple[str, dict[str, Any], str]] = [
    ("adaptive_tree", {}, "auto"),
    ("opt_tree", {}, "auto"),
    ("opt_tree", {"threshold": 0}, "auto"),
    ("eagle2", {}, "auto"),
    ("dyspec", {}, "auto"),
    ("sequoia", {}, "auto"),
    ("static_tree", {"shape": [3, 2, 1, 1, 1]}, "auto"),
]
"""`adaptive_tree` begins with a table that has seen nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=14, help="a full binary tree of three levels has 14")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", action="store_true", help="each method with its own rule")
    parser.add_argument(
        "--model", type=Path, default=PAIR / "target", metavar="FOLDER", help="default: the bundled one"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompts; default: modules of the standard library")
    parser.add_argument("--draft", default=str(PAIR / "draft"), metavar="FOLDER", help="default: the bundled model")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    options = parser.parse_args()
    texts = prompts(options.prompts, options.data)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for method, tree, rule in METHODS if options.methods else CONFIGS:
        key = {
            "method": method,
            "tree": {name: value for name, value in tree.items() if value is not None},
            "rule": rule,
        }
        if any({name: row[name] for name in key} == key for row in rows):
            continue
        spec = {"model": options.draft, "num_speculative_tokens": options.nodes, "rejection_sample_method": rule}
        llm = start({**spec, "method": method, "tree": {**key["tree"], "budget": None}}, options.model)
        for temperature in options.temperatures:
            rows.append({**key, "temperature": temperature, **measure(llm, texts, temperature)})
            print(rows[-1], flush=True)
        llm.llm_engine.engine_core.shutdown()
        save(options.out, rows)


if __name__ == "__main__":
    main()
