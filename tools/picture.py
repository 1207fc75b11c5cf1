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
from typing import Any

from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.report import viewer
from vllm_adaptive_tree.report.layout import Place, places, visible

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RECORD = FIGURES / "steps.jsonl"
PROMPT = "def __eq__(self, other):\n        if not isinstance("
NODES = 12
CONFIG = {"method": "opt_tree", "num_speculative_tokens": NODES, "tree": {"budget": None, "threshold": 0.1}}
"""Engine with whole trees, whatever they cost: with a target this small a budget would let the draft rest."""
TOKENS = 40
STEPS = slice(4, 7)
"""Steps of the record in the picture: two that accept much and one that does not."""
BUDGETS = (3, 6, 12)  # nodes, in the other one

ROW, COLUMN, LEFT, TOP, WIDTH, HEIGHT = 42, 104, 16, 74, 84, 34  # pixels
LETTERS = (WIDTH - 14) // 8
STYLE = """
svg { --ink: #1f2328; --quiet: #59636e; --page: #fff; --node: #f6f8fa; --line: #d1d9e0; --good: #1a7f37;
  --kept: #dafbe1; --own: #0969da; --bonus: #ddf4ff; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --quiet: #9198a1; --page: #0d1117; --node: #151b23;
  --line: #3d444d; --good: #3fb950; --kept: #12331c; --own: #4493f8; --bonus: #10233d; } }
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); }
.title { font: 600 14px system-ui, sans-serif; } .note { font: 13px system-ui, sans-serif; fill: var(--quiet); }
.page { fill: var(--page); stroke: var(--line); }
.node { fill: var(--node); stroke: var(--line); } .no, .value { fill: var(--quiet); } .value { font-size: 10px; }
.kept { fill: var(--kept); stroke: var(--good); }
.bonus { fill: var(--bonus); stroke: var(--own); } .root { fill: var(--page); stroke: var(--ink); }
.edge { stroke: var(--line); fill: none; } .path { stroke: var(--good); stroke-width: 2.5; fill: none; }
.last { stroke: var(--own); stroke-width: 2; stroke-dasharray: 4 3; fill: none; }
"""


def tree(
    step: dict[str, Any], texts: dict[str, str], root: str, *, size: int, accepted: bool
) -> tuple[list[str], Place]:
    """SVG elements of the first `size` nodes of a step's tree, and the last column and row."""
    tokens, parents = list(step["tokens"][:size]), list(step["parents"][:size])
    path = step["accepted"] if accepted else []
    classes = ["kept" if node in path else "node" for node in range(size)]
    edges = ["path" if node in path else "edge" for node in range(size)]
    if accepted:  # the target's own token, as one more child of the last accepted node
        tokens.append(step["emitted"][-1])
        parents.append(path[-1] if path else -1)
        classes.append("bonus")
        edges.append("last")
    where = places(parents)
    svg = [_edge(where[1 + parent], where[1 + node], edges[node]) for node, parent in enumerate(parents)]
    svg += _box(where[0], root, "root", None)
    for node, token in enumerate(tokens):
        value = step["values"][node] if node < size else None
        svg += _box(where[1 + node], texts[str(token)], classes[node], value)
    return svg, Place(max(place.depth for place in where), max(place.row for place in where))


def _box(place: Place, text: str, name: str, value: float | None) -> list[str]:
    x, y = _corner(place)
    quiet = ' class="no"' if name == "node" else ""
    found = [
        f'<rect class="{name}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>',
        f'<text{quiet} x="{x + 7}" y="{y + (15 if value is not None else 22)}">{escape(visible(text, LETTERS))}</text>',
    ]
    if value is not None:
        found.append(f'<text class="value" x="{x + 7}" y="{y + 28}">{value:.2f}</text>')
    return found


def _corner(place: Place) -> tuple[int, int]:
    return LEFT + COLUMN * place.depth, ROW * place.row


def _edge(start: Place, end: Place, name: str) -> str:
    (x, y), (to, at) = _corner(start), _corner(end)
    x, y, at = x + WIDTH, y + HEIGHT // 2, at + HEIGHT // 2
    middle = (x + to) // 2
    return f'<path class="{name}" d="M{x} {y}C{middle} {y} {middle} {at} {to} {at}"/>'


def _document(panels: Sequence[tuple[str, str, list[str], Place]], label: str) -> str:
    """SVG document of panels below each other: title, note, elements, last column and row."""
    body, y = [], 12
    width = max(LEFT + COLUMN * (1 + end.depth) for *_, end in panels)
    for title, note, elements, end in panels:
        body.append(f'<text class="title" x="{LEFT}" y="{y + 16}">{escape(title)}</text>')
        body.append(f'<text class="note" x="{LEFT}" y="{y + 36}">{escape(note)}</text>')
        body.append(f'<g transform="translate(0 {y + 50})">{"".join(elements)}</g>')
        y += TOP + ROW * (1 + end.row)
    frame = f'<rect class="page" width="{width}" height="{y}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, f"<style>{STYLE}</style>", frame, *body, "</svg>"]) + "\n"


def steps(record: dict[str, Any]) -> str:
    """Picture of some steps of a record: drafted nodes, accepted nodes, and the target's own tokens."""
    panels, texts = [], record["texts"]
    for index, step in [*enumerate(record["steps"])][STEPS]:
        emitted = [texts[str(token)] for token in step["emitted"]]
        size, taken = step["verified"], len(step["accepted"])
        elements, end = tree(step, texts, _root(record, index), size=size, accepted=True)
        title = f"Step {step['step']}: {size} nodes in one forward of the target, {taken} accepted, {taken + 1} tokens"
        panels.append((title, f"the text goes on with {visible(''.join(emitted), 80)}", elements, end))
    return _document(panels, "Three steps of OPT-Tree on the bundled pair")


def budget(record: dict[str, Any]) -> str:
    """Picture of one step's tree under smaller budgets: its first nodes in generation order, the most likely ones."""
    index = STEPS.start
    step, panels = record["steps"][index], []
    for size in BUDGETS:
        elements, end = tree(step, record["texts"], _root(record, index), size=size, accepted=False)
        expected = sum(step["values"][:size])
        panels.append((f"{size} nodes", f"expected acceptance {expected:.2f} tokens by the draft", elements, end))
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
