"""Cost of a node's mask with a large vocabulary, by kind of grammar: microseconds per node.

    python -m benchmarks.mask_cost --out benchmarks/results/mask_cost.json

xgrammar, one thread. The large vocabulary is synthetic: the bundled tokenizer's strings, and pairs of them. Trees of 24
nodes in four levels, whose tokens the grammar allows, along texts that it allows. "Verify": the scheduler's masks of a
whole tree (`GrammarWalk.fill_tree`). "Draft": the draft's masks and their application, level by level
(`MaskedDrafter`). "Apply": a mask on a row of the target's logits, as vLLM does on a CPU.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.structured import SHAPES
from benchmarks.tokens_per_step import PAIR
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.grammar.masked_drafter import MaskedDrafter, unpacked
from vllm_adaptive_tree.engine.grammar.walk import Bounds, GrammarWalk, TreeTokens

LEVELS = 3, 5, 8, 8
"""Nodes of a tree by depth."""
LENGTH, TEXTS = 24, 4
"""Steps of a text, and number of texts."""


def vocabulary(size: int) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    ids = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    small = [tokenizer.convert_tokens_to_string([token]) for token, _ in ids]
    choose, found = random.Random(0), dict.fromkeys(small)
    while len(found) < size:
        found[choose.choice(small) + choose.choice(small)] = None
    return list(found)[:size]


def compiler(size: int) -> Any:
    import xgrammar

    tokens = vocabulary(size - 1)
    info = xgrammar.TokenizerInfo([*tokens, "<end>"], xgrammar.VocabType.RAW, stop_token_ids=[len(tokens)])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compiled(made: Any, shape: dict[str, Any]) -> Any:
    """Compile a grammar as vLLM's backend does."""
    ((kind, given),) = shape.items()
    match kind:
        case "regex":
            return made.compile_regex(given)
        case "choice":
            return made.compile_grammar("root ::= " + " | ".join(f'"{one}"' for one in given))
        case "json":
            return made.compile_json_schema(json.dumps(given), any_whitespace=True)
        case "grammar":
            return made.compile_grammar(given)
        case "json_object":
            return made.compile_json_schema('{"type": "object"}', any_whitespace=True)
    import xgrammar

    tags = json.loads(given)
    items = [
        xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
        for one in tags["structures"]
    ]
    return made.compile_structural_tag(items, tags["triggers"])


class Nothing:
    """A drafter with a uniform distribution."""

    def __init__(self, size: int):
        self.size = size

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return Rows(torch.zeros(*tokens.shape, self.size)), state


def allowed(walk: GrammarWalk, path: list[int], size: int) -> list[int]:
    mask = torch.empty(1, walk.words, dtype=torch.int32)
    return unpacked(mask, size)[0].nonzero().flatten().tolist() if walk.fill(path, mask) else [0]


def grown(walk: GrammarWalk, size: int, choose: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Levels of a tree that the grammar allows: tokens, and the slot (0: the root) of each one's parent."""
    paths, above = [list[int]()], [0]
    for width in LEVELS:
        parents = sorted(choose.choices(above, k=width))
        tokens = [choose.choice(allowed(walk, paths[parent], size)) for parent in parents]
        above = list(range(len(paths), len(paths) + width))
        paths += [[*paths[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        yield tokens, parents
    walk.close()


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def drafted(levels: list[tuple[list[int], list[int]]], walk: GrammarWalk | None, size: int) -> float:
    """Seconds of a draft that does nothing, under a grammar or without one."""
    rows = [Nothing(size).grow(torch.zeros(1, 1), torch.zeros(1, 1), None)[0]]
    rows += [Nothing(size).grow(torch.zeros(1, len(tokens)), torch.zeros(1, 1), None)[0] for tokens, _ in levels]
    given = iter(rows[1:])

    class Given:
        def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
            return next(given), state

    drafter: Any = MaskedDrafter(Given(), {} if walk is None else {0: (walk, [])})

    def run() -> None:
        drafter.roots(rows[0])
        for tokens, parents in levels:
            drafter.grow(torch.tensor([tokens]), torch.tensor([parents]), None)
        if walk is not None:
            walk.close()

    return timed(run)


def measure(kind: str, made: Any, size: int) -> dict[str, Any]:
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    nodes, context = sum(LEVELS), list[Any]()
    seconds = timed(lambda: context.append(compiled(made, SHAPES[kind])))
    logits, mask = torch.randn(1 + nodes, size), xgrammar.allocate_token_bitmask(1 + nodes, size)
    times: dict[str, list[float]] = {"verify": [], "draft": [], "apply": []}
    for text in range(TEXTS):
        choose = random.Random(text)
        matcher = xgrammar.GrammarMatcher(context[0], max_rollback_tokens=nodes)
        walk = GrammarWalk(
            XgrammarGrammar(matcher=matcher, vocab_size=size, ctx=context[0]), lambda path: Bounds(0, 0), mask.shape[1]
        )
        for _ in range(LENGTH):
            if walk.grammar.is_terminated():
                break
            token = choose.choice(allowed(walk, [], size))
            levels = list(grown(walk, size, choose))
            tree = TreeTokens([one for tokens, _ in levels for one in tokens], [p - 1 for _, ps in levels for p in ps])
            times["verify"].append(timed(lambda t=tree, w=walk: w.fill_tree(t, mask)))  # type: ignore[misc]
            times["apply"].append(timed(lambda: xgrammar.apply_token_bitmask_inplace(logits, mask)))
            times["draft"].append(drafted(levels, walk, size) - drafted(levels, None, size))
            walk.grammar.accept_tokens("", [token])
    found: dict[str, Any] = {"kind": kind, "vocabulary": size, "trees": len(times["verify"])}
    found["compile_ms"] = round(seconds * 1e3, 1)
    for name, values in times.items():
        per_node = sorted(1e6 * value / (1 + nodes) for value in values)
        found[name] = {"median": round(statistics.median(per_node), 1), "largest": round(per_node[-1], 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[2_048, 128_256])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.vocabulary:
        made = compiler(size)
        for kind in SHAPES:
            rows.append(measure(kind, made, size))
            print(rows[-1], flush=True)
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
