"""One HTML file from the recorded steps of an engine: the trees, with their verified, accepted and cut nodes."""

import json
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parent / "viewer.html"
FORMAT = 1
STEP = {"request", "position", "tokens", "parents", "values", "verified", "accepted", "emitted"}


def read(file: Path, most: int) -> dict[str, Any]:
    """Read the last `most` trees of a record: {"header": .., "texts": .., "steps": ..}. An incomplete last line is left
    out: the engine was stopped, or its disk full.

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
    return {"header": header, "texts": texts, "steps": trees[-most:]}


def page(record: dict[str, Any]) -> str:
    """HTML file, with all that it needs inside."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    before, after = TEMPLATE.read_text().split(">RECORD<")
    return f"{before}>{text.replace('<', chr(92) + 'u003c')}<{after}"
