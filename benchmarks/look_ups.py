"""Copying work: trees of look-ups, and look-ups merged into a model's trees, beside plain trees and vLLM's look-ups.

    python -m benchmarks.look_ups --out benchmarks/results/look_ups.json

Greedy, float32, the bundled models. Every prompt is a piece of a held-out module and its beginning once more, as of an
edit; the target goes on with 128 tokens. It measures acceptance, not speed.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import NEW_TOKENS, PAIR, measured
from examples.train_demo_pair import documents, is_held_out
from vllm_adaptive_tree.bench.provenance import save

SHOWN, AGAIN = 900, 120
"""Characters of a piece, and of its repetition."""


def prompts(count: int) -> list[str]:
    texts = [text for name, text in sorted(documents().items()) if is_held_out(name) and len(text) > 4000]
    pieces = [text[start * 1000 :][:SHOWN] for start in range(1, 4) for text in texts]
    return [f"{piece}\n\n# The same again:\n{piece[:AGAIN]}" for piece in pieces][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts, nodes = prompts(options.prompts), options.nodes
    model, head = str(PAIR / "draft"), str(PAIR / "head")

    def opt_tree(draft: str, **tree: Any) -> dict[str, Any]:
        tree = {"budget": None, **tree}
        return {"method": "opt_tree", "model": draft, "num_speculative_tokens": nodes, "tree": tree}

    specs: dict[str, dict[str, Any]] = {
        "vLLM's suffix": {"method": "suffix", "num_speculative_tokens": nodes},
        "OPT-Tree, ngram": opt_tree("ngram"),
        "OPT-Tree, ngram, max_depth 10": opt_tree("ngram", max_depth=10),
        "OPT-Tree, suffix": opt_tree("suffix"),
        "OPT-Tree, suffix, max_depth 10": opt_tree("suffix", max_depth=10),
        "OPT-Tree, draft model": opt_tree(model),
        "OPT-Tree, draft model and ngram": opt_tree(model, lookup="ngram"),
        "OPT-Tree, draft model and suffix": opt_tree(model, lookup="suffix"),
        "OPT-Tree, head": opt_tree(head),
        "OPT-Tree, head and suffix": opt_tree(head, lookup="suffix"),
        # The last: what it imports keeps vLLM's CPU build from starting another engine in this process.
        "vLLM's ngram, 8 tokens": {
            "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 4
        },
    }  # fmt: skip
    rows = []
    for name, spec in specs.items():
        found = measured(spec, texts)
        accepted, tokens = (found["tokens_per_step"] - 1) * found["steps"], len(texts) * (NEW_TOKENS - 1)
        # a look-up that finds nothing drafts nothing: those steps count, too
        rows.append({"name": name, "tokens_per_step": tokens / (tokens - accepted), "nodes": found["nodes_per_step"]})
        print(rows[-1], flush=True)
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
