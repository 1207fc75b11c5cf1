import io
import random

from rich.console import Console
from rich.text import Text

from vllm_adaptive_tree.report.drawing import drawn
from vllm_adaptive_tree.report.layout import places, visible
from vllm_adaptive_tree.report.tokens import Span, coloured, spans


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_coloured_text_is_the_decoded_text() -> None:
    text = 'print("naïve 🌳")\n'
    data = list(text.encode())  # one token per byte: characters of up to four tokens
    for width in range(1, 6):
        steps = [data[start : start + width] for start in range(0, len(data), width)]
        assert coloured(spans(steps, decode)).plain == text
    assert spans([[*b"a"], [*b"bc"], [*b"de\xff"]], decode) == [
        Span("a", drafted=False),
        Span("b", drafted=True),
        Span("c", drafted=False),
        Span("de", drafted=True),
        Span("\N{REPLACEMENT CHARACTER}", drafted=False),
    ]


def test_places_of_nodes_never_meet_and_edges_cross_none() -> None:
    """First children keep the row; between a parent's row and a child's no node stands in the child's column."""
    assert places([]) == [(0, 0)]
    assert places([-1, -1, 0, 0, 2]) == [(0, 0), (1, 0), (1, 2), (2, 0), (2, 1), (3, 0)]
    draw = random.Random(0)
    for _ in range(200):
        parents = [draw.randrange(-1, node) for node in range(draw.randrange(1, 30))]
        found = places(parents)
        assert len({*found}) == len(found)
        for node, parent in enumerate(parents):
            start, end = found[1 + parent], found[1 + node]
            assert end.depth == start.depth + 1
            assert end.row >= start.row
        rows = max(place.row for place in found) + 1
        assert rows == len(parents) + 1 - len({*parents}), "one for each leaf"


def test_text_of_tokens_is_cut() -> None:
    assert visible(" a\n", 10) == "·a⏎"
    assert visible("abcdefghij", 5) == "abcd…"


def test_a_tree_has_its_accepted_nodes_and_the_targets_token() -> None:
    step = {"tokens": [5, 6, 7, 8], "parents": [-1, -1, 1, 2], "values": [0.5, 0.3, 0.25, 0.1]}
    step |= {"verified": 3, "accepted": [1, 2], "emitted": [6, 7, 9]}
    console = Console(width=40, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(drawn(step, {"5": " a", "6": "b\n", "7": "c", "9": "e"}))
    marked = console.export_text(styles=True)
    assert [line.rstrip() for line in Text.from_ansi(marked).plain.splitlines()] == [
        "the last token",
        "├── ␣a 0.50",
        "└── b\\n 0.30",
        "    └── c 0.25",
        "        └── e",
    ]
    assert all(f"[32m{token}" in marked for token in ("b\\n", "c"))
    assert "[35me" in marked
