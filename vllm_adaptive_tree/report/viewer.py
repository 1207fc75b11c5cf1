"""One HTML file from the recorded steps of an engine: the trees, with their verified, accepted and cut nodes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.report.layout import places

TEMPLATE = Path(__file__).parent / "viewer.html"
FORMAT = 1
STEP = {"request", "position", "tokens", "parents", "values", "verified", "accepted", "emitted"}


def read(file: Path, most: int) -> dict[str, Any]:
    """Read the last `most` trees of a record: {"header": .., "texts": .., "given": .., "steps": ..}; `given`: the text
    before each request's first one of them. An incomplete last line is left out: the engine was stopped, or its disk
    full.

    Raises:
        ValueError: it is not a record, or it holds no tree.
    """
    *lines, _ = file.read_text().split("\n")
    try:
        header, *steps = map(json.loads, lines)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}")
        texts = {token: text for step in steps for token, text in step["texts"].items()}
        trees = [{"step": step["step"], **request} for step in steps for request in step["requests"]]
        if not all(tree.keys() >= STEP for tree in trees):
            raise ValueError("a tree lacks something")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a record of steps: set ADAPTIVE_TREE_RECORD for an engine") from error
    if not trees:
        raise ValueError(f"{file} holds no tree: the engine has drafted none while it was recorded")
    earlier, chosen = trees[:-most], trees[-most:]
    given: dict[str, str] = {}
    for tree in earlier:
        emitted = "".join(texts.get(str(token), "") for token in tree["emitted"])
        given[tree["request"]] = given.get(tree["request"], tree.get("given", "")) + emitted
    for tree in chosen:
        given.setdefault(tree["request"], tree.get("given", ""))
    found = {"header": header, "texts": texts, "given": given}
    return found | {"steps": [*_placed(chosen)], "summary": summary(chosen)}


def _placed(trees: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Trees with the token of their root, None where the step before is not recorded, and the places of the root, of
    the nodes, and of the target's own token, a child of the last accepted node."""
    before: dict[str, Mapping[str, Any]] = {}
    for tree in trees:
        last = before.get(tree["request"])
        follows = last is not None and last["position"] + len(last["emitted"]) == tree["position"]
        end = tree["accepted"][-1] if tree["accepted"] else -1
        root = last["emitted"][-1] if last is not None and follows else None
        yield {**tree, "root": root, "end": end, "places": places([*tree["parents"], end])}
        before[tree["request"]] = tree


def summary(trees: Sequence[Mapping[str, Any]]) -> str:
    """Tokens of a step, and how often a node of each depth, and an earlier or later sibling, was accepted."""
    count, deepest = len(trees), max(len(tree["accepted"]) for tree in trees)
    depths = [sum(len(tree["accepted"]) > depth for tree in trees) / count for depth in range(deepest)]
    ranks: dict[int, int] = {}
    for tree in trees:
        for node in tree["accepted"]:
            rank = sum(parent == tree["parents"][node] for parent in tree["parents"][:node])
            ranks[rank] = ranks.get(rank, 0) + 1
    accepted = sum(ranks.values())
    shares = {
        "accepted at depth": enumerate(depths),
        "of them child": ((r, ranks[r] / accepted) for r in sorted(ranks)),
    }
    parts = [f"{name} {', '.join(f'{1 + at}: {share:.0%}' for at, share in found)}" for name, found in shares.items()]
    tokens = sum(len(tree["emitted"]) for tree in trees) / count
    return "; ".join([f"{count} trees, {tokens:.2f} tokens each", *(parts if accepted else [])])


def page(record: dict[str, Any]) -> str:
    """HTML file, with all that it needs inside."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    before, after = TEMPLATE.read_text().split(">RECORD<")
    return f"{before}>{text.replace('<', chr(92) + 'u003c')}<{after}"
