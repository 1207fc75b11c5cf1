"""Trees of an EAGLE-3 head beside vLLM's own chains of it, at equal draft forwards, and at equal verified nodes.

    python -m benchmarks.head_trees --out benchmarks/results/head_trees.json

Greedy, float32, the bundled target with its head, on modules held out from their training; every row decodes the same
prompts, 128 tokens each. It measures acceptance, not speed. A chain of K takes K forwards of the head and verifies K
nodes.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import PAIR, measured, prompts
from vllm_adaptive_tree.bench.provenance import save

METHODS: dict[str, dict[str, Any]] = {
    "opt_tree": {"threshold": 0},
    "eagle2": {"top_k": 10},
    "dyspec": {"threshold": 0.0},
    "c2t": {},
}
"""Options with which a method grows to its full depth."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", default=str(PAIR / "head"))
    parser.add_argument("--forwards", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts, rows = prompts(options.prompts), list[dict[str, Any]]()

    def add(method: str, forwards: int, spec: dict[str, Any]) -> None:
        found = measured({"model": options.head, **spec}, texts)
        rows.append({"method": method, "forwards": forwards, "nodes": spec["num_speculative_tokens"], **found})
        chain = next(row for row in rows if row["method"] == "chain" and row["forwards"] == forwards)
        rows[-1]["to_chain"] = rows[-1]["tokens_per_step"] / chain["tokens_per_step"]
        print(rows[-1], flush=True)

    for forwards in options.forwards:
        add("chain", forwards, {"method": "eagle3", "num_speculative_tokens": forwards})
        for method in options.methods:
            tree = {"budget": None, "max_depth": forwards, **METHODS[method]}
            for nodes in (options.nodes, forwards) if method == "opt_tree" else (options.nodes,):
                add(method, forwards, {"method": method, "num_speculative_tokens": nodes, "tree": tree})
    draft = {"method": "opt_tree", "model": str(PAIR / "draft"), "num_speculative_tokens": 12, "tree": {"budget": None}}
    rows.append({"method": "opt_tree on the bundled draft model", "nodes": 12, **measured(draft, texts)})
    head = {**draft, "model": options.head}
    rows.append({"method": "opt_tree", "nodes": 12, **measured(head, texts)})
    print(*rows[-2:], sep="\n")
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
