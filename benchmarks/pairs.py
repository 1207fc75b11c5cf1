"""Tokens per step of every lossless pair of proposer and acceptance rule, at T = 0, 0.6 and 1.

    python -m benchmarks.pairs --out benchmarks/results/pairs.json

Float32, on the bundled pair and the modules held out from its training, without seeds (a seeded request is walked with
`target_only`). It measures acceptance, not speed. Rows are saved as they come; a run goes on where the last one ended.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import PAIR, measure, prompts, start

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=14, help="a full binary tree of three levels has 14")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    texts = prompts(options.prompts)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    for method, tree, rule in CONFIGS:
        key = {"method": method, "tree": {name: value for name, value in tree.items() if value}, "rule": rule}
        if any({name: row[name] for name in key} == key for row in rows):
            continue
        spec = {"model": str(PAIR / "draft"), "num_speculative_tokens": options.nodes, "rejection_sample_method": rule}
        llm = start({**spec, "method": method, "tree": {**key["tree"], "budget": None}})
        for temperature in TEMPERATURES:
            rows.append({**key, "temperature": temperature, **measure(llm, texts, temperature)})
            print(rows[-1], flush=True)
        llm.llm_engine.engine_core.shutdown()
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
