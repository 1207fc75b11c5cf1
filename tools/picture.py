"""Draws pictures of recorded steps, for README and docs: SVG, without a browser.

python -m tools.picture --record    # an engine on the bundled pair decodes one prompt and records its steps
python -m tools.picture             # draws docs/figures/steps.svg and budget.svg from docs/figures/steps.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.report import viewer

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RECORD = FIGURES / "steps.jsonl"
PROMPT = "for key, value in sorted(items.items()):\n    "
NODES = 12
CONFIG = {"method": "opt_tree", "num_speculative_tokens": NODES, "tree": {"budget": None, "threshold": 0.1}}
"""Engine with whole trees, whatever they cost: with a target this small a budget would let the draft rest."""
TOKENS = 40
STEPS = slice(11, 14)
"""Steps of the record in the picture: two that accept much and one that does not."""
BUDGETS = (3, 6, 12)  # nodes, in the other one

ROW, COLUMN, LEFT, TOP, HEIGHT = 30, 104, 16, 74, 22  # pixels
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; }
.title { font: 600 14px system-ui, sans-serif; } .note { font: 13px system-ui, sans-serif; fill: #59636e; }
.node { fill: #f6f8fa; stroke: #d1d9e0; } .no { fill: #59636e; } .value { font-size: 10px; fill: #59636e; }
.kept { fill: #dafbe1; stroke: #1a7f37; }
.bonus { fill: #ddf4ff; stroke: #0969da; } .root { fill: #fff; stroke: #1f2328; }
.edge { stroke: #d1d9e0; fill: none; } .path { stroke: #1a7f37; stroke-width: 2.5; fill: none; }
.last { stroke: #0969da; stroke-width: 2; stroke-dasharray: 4 3; fill: none; }
"""


class Box(NamedTuple):
    depth: int
    row: int
    text: str
    classes: str


def shown(text: str) -> str:
    """Text of a token, with whitespace made visible."""
    return text.replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u00b7")


def layout(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depth and row of every node: first children continue the row of their parent, others start a new one."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    depth, row = [0] * len(parents), [0] * len(parents)
    rows = 0

    def place(parent: int, level: int, at: int) -> None:
        nonlocal rows
        for index, node in enumerate(children.get(parent, [])):
            if index:
                rows += 1
            depth[node], row[node] = level, rows if index else at
            place(node, level + 1, row[node])

    place(-1, 1, 0)
    return depth, row


def tree(step: dict[str, Any], texts: dict[str, str], root: str, *, size: int, accepted: bool) -> tuple[list[str], int]:
    """SVG elements of the first `size` nodes of a step's tree, and their number of rows."""
    tokens, parents = step["tokens"][:size], step["parents"][:size]
    depth, row = layout(parents)
    path = step["accepted"] if accepted else []
    boxes = {-1: Box(0, 0, shown(root), "root")}
    for node, token in enumerate(tokens):
        boxes[node] = Box(depth[node], row[node], shown(texts[str(token)]), "kept" if node in path else "node")
    edges = [(parent, node, "path" if node in path else "edge") for node, parent in enumerate(parents)]
    rows = max(box.row for box in boxes.values()) + 1
    if accepted:
        end = boxes[path[-1] if path else -1]
        inside = any(box.row == end.row and box.depth == end.depth + 1 for box in boxes.values())
        boxes[size] = Box(end.depth + 1, rows if inside else end.row, shown(texts[str(step["emitted"][-1])]), "bonus")
        edges.append((path[-1] if path else -1, size, "last"))
        rows += inside
    svg = [_edge(boxes[start], boxes[end], name) for start, end, name in edges]
    for node, box in boxes.items():
        x, y = _place(box)
        quiet = ' class="no"' if box.classes == "node" else ""
        svg.append(f'<rect class="{box.classes}" x="{x}" y="{y}" width="{_width(box)}" height="{HEIGHT}" rx="5"/>')
        svg.append(f'<text{quiet} x="{x + 7}" y="{y + 15}">{escape(box.text)}</text>')
        if 0 <= node < size:
            value = f"{step['values'][node]:.2f}"
            svg.append(f'<text class="value" x="{x + _width(box) + 3}" y="{y + 9}">{value}</text>')
    return svg, rows


def _place(box: Box) -> tuple[int, int]:
    return LEFT + COLUMN * box.depth, ROW * box.row


def _width(box: Box) -> int:
    return 14 + 8 * len(box.text)


def _edge(start: Box, end: Box, name: str) -> str:
    (x, y), (to, at) = _place(start), _place(end)
    x, y, at = x + _width(start), y + HEIGHT // 2, at + HEIGHT // 2
    middle = x + max((to - x) // 2, 4)
    return f'<path class="{name}" d="M{x} {y}C{middle} {y} {middle} {at} {to} {at}"/>'


def _document(panels: Sequence[tuple[str, str, list[str], int]], label: str) -> str:
    """SVG document of panels below each other: title, note, elements, rows."""
    body, y, width = [], 12, 720
    for title, note, elements, rows in panels:
        body.append(f'<text class="title" x="{LEFT}" y="{y + 16}">{escape(title)}</text>')
        body.append(f'<text class="note" x="{LEFT}" y="{y + 36}">{escape(note)}</text>')
        body.append(f'<g transform="translate(0 {y + 50})">{"".join(elements)}</g>')
        y += TOP + ROW * rows
    frame = f'<rect width="{width}" height="{y}" rx="8" fill="#fff" stroke="#d1d9e0"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, f"<style>{STYLE}</style>", frame, *body, "</svg>"]) + "\n"


def steps(record: dict[str, Any]) -> str:
    """Picture of some steps of a record: drafted nodes, accepted nodes, and the target's own tokens."""
    panels, texts = [], record["texts"]
    for index, step in [*enumerate(record["steps"])][STEPS]:
        emitted = [texts[str(token)] for token in step["emitted"]]
        size, taken = step["verified"], len(step["accepted"])
        elements, rows = tree(step, texts, _root(record, index), size=size, accepted=True)
        title = f"Step {step['step']}: {size} nodes in one forward of the target, {taken} accepted, {taken + 1} tokens"
        panels.append((title, f"the text goes on with {shown(''.join(emitted))}", elements, rows))
    return _document(panels, "Three steps of OPT-Tree on the bundled pair")


def budget(record: dict[str, Any]) -> str:
    """Picture of one step's tree under smaller budgets: its first nodes in generation order, the most likely ones."""
    index = STEPS.start
    step, panels = record["steps"][index], []
    for size in BUDGETS:
        elements, rows = tree(step, record["texts"], _root(record, index), size=size, accepted=False)
        expected = sum(step["values"][:size])
        panels.append((f"{size} nodes", f"expected acceptance {expected:.2f} tokens by the draft", elements, rows))
    return _document(panels, "One tree under three node budgets")


def _root(record: dict[str, Any], index: int) -> str:
    """Text of the root of this step's tree: the last token of the step before."""
    return str(record["texts"][str(record["steps"][index - 1]["emitted"][-1])])


PICTURES = {"steps.svg": steps, "budget.svg": budget}


def record(file: Path) -> None:
    """Decode `PROMPT` on the bundled pair, in float32, and record the steps in `file`."""
    os.environ.update(ADAPTIVE_TREE_RECORD=str(file), OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams

    from vllm_adaptive_tree.bench.environment import DRAFT, TARGET

    config = {**CONFIG, "model": DRAFT}
    llm = LLM(TARGET, speculative_config=config, dtype="float32", max_model_len=512, enforce_eager=True)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS))
    header, *lines = file.read_text().splitlines()
    named = {**json.loads(header), "model": Path(TARGET).relative_to(Path(TARGET).parents[1]).as_posix()}
    atomic_write(file, "\n".join([json.dumps(named), *lines, ""]).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.picture", description=__doc__)
    parser.add_argument("--record", action="store_true", help="record the steps first, with an engine of its own")
    if parser.parse_args(arguments).record:
        record(RECORD)
    found = viewer.read(RECORD, 10_000)
    for name, draw in PICTURES.items():
        atomic_write(FIGURES / name, draw(found).encode())
        print(f"{FIGURES / name}: {(FIGURES / name).stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
