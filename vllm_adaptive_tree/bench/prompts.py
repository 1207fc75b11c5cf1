"""Prompts: files of them, and those of the demo, in the style of Python's standard library, like the bundled pair."""

import re
from pathlib import Path


def parse(text: str) -> tuple[str, ...]:
    """Prompts of a file: blocks between lines of three dashes, or one per line where there is no such line."""
    blocks = re.split(r"\n?^---[ \t]*$\n?", text.removesuffix("\n"), flags=re.MULTILINE)
    return tuple(prompt for prompt in (blocks if len(blocks) > 1 else text.splitlines()) if prompt.strip())


PROMPTS = parse(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
