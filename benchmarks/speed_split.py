"""Prompts by kind of text, as SPEED-Bench has them, of the modules held out from the bundled pair's training.

    python -m benchmarks.speed_split --folder build/split       # a dataset for each kind, and one of all in turn
    vllm bench serve --dataset-name custom --dataset-path build/split/code.jsonl ..
    python -m benchmarks.speed_split --out benchmarks/results/speed_split.json    # tokens per step by kind

Acceptance depends on the text: code to continue, prose in docstrings, records of JSON, functions that are repeated, and
repeated with another name. The measurement is greedy, float32, 128 tokens each.
"""

import argparse
import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.train_demo_pair import documents, is_held_out
from vllm_adaptive_tree.bench.provenance import save

LONGEST = 900
"""Most characters of a prompt: about 300 tokens of the bundled pair."""
RECORDS = 4
WAYS: dict[str, dict[str, Any]] = {
    "chain of 3": {"method": "draft_model", "num_speculative_tokens": 3},
    "OPT-Tree, 12 nodes": {
        "method": "opt_tree",
        "num_speculative_tokens": 12,
        "tree": {"budget": None, "threshold": 0},
    },
}


def splits(count: int, seed: int = 0) -> dict[str, list[str]]:
    """Kind of text -> `count` prompts, no two alike, the same in every run of one release of Python.

    Raises:
        ValueError: the held-out modules have fewer; the message gives their number.
    """
    found = dict[str, dict[str, None]]()  # in order, each once
    for module, text in sorted(documents().items()):
        if is_held_out(module) and not module.startswith("topic "):
            for kind, prompt in _of_module(module, text):
                found.setdefault(kind, {})[prompt] = None
    for kind, prompts in found.items():
        if len(prompts) < count:
            raise ValueError(f"{len(prompts)} prompts of kind {kind!r} are held out, fewer than {count}: ask for less")
    return {kind: random.Random(seed).sample([*prompts], count) for kind, prompts in found.items()}


def _of_module(module: str, text: str) -> Iterator[tuple[str, str]]:
    """Kinds and prompts of a module."""
    lines, records = text.splitlines(keepends=True), list[dict[str, Any]]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        start, end, body = node.lineno - 1, node.end_lineno, node.body[0].lineno - 1
        arguments = [one.arg for one in node.args.args]
        records.append({"module": module, "line": node.lineno, "function": node.name, "arguments": arguments})
        own = "".join(lines[start:end])
        if end - body > 5:
            yield "code", "".join(lines[max(0, start - 4) : (body + end) // 2])[-LONGEST:]
        documented = ast.get_docstring(node, clean=False)
        if documented is not None and len(documented) > 120 and documented in own:  # without escapes
            yield "prose", own[: own.index(documented) + len(documented) // 3][-LONGEST:]
        if 160 < len(own) < LONGEST / 2 and body > start:
            head = "".join(lines[start:body])
            yield "copies", f"{own}\n{head}"
            name = next((one for one in arguments if one not in ("self", "cls", "data")), None)
            if name is not None:
                yield "edits", f"{own}\n# {name} is called data here\n" + re.sub(rf"\b{name}\b", "data", head)
    for first in range(len(records) - RECORDS):
        shown = [json.dumps(one) for one in records[first : first + RECORDS]]
        yield "JSON", "[\n" + "".join(f" {one},\n" for one in shown) + ' {"module": "'


def write(folder: Path, kinds: dict[str, list[str]]) -> None:
    """Datasets of `vllm bench serve`, one for each kind, and `all` with the kinds in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = [prompt for row in zip(*kinds.values(), strict=True) for prompt in row]
    for kind, prompts in {**kinds, "all": turns}.items():
        (folder / f"{kind.lower()}.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))


def measured(kinds: dict[str, list[str]]) -> list[dict[str, Any]]:
    from benchmarks.tokens_per_step import PAIR, measure, start

    rows = []
    for way, spec in WAYS.items():
        llm = start({**spec, "model": str(PAIR / "draft")})
        for kind, prompts in kinds.items():
            rows.append({"way": way, "kind": kind, **measure(llm, prompts)})
            print(rows[-1], flush=True)
        llm.llm_engine.engine_core.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = splits(options.count, options.seed)
    if options.folder:
        write(options.folder, kinds)
    if options.out:
        save(options.out, measured(kinds))


if __name__ == "__main__":
    main()
