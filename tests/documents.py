"""Contents of the pages of this repository: fenced blocks, the commands in them, configurations, links."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("README.md"),
        *(ROOT / "examples").rglob("README.md"),
        *(ROOT / "patches").glob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    }
)
RUN = "<!-- run -->"
"""In front of a block of Python that a test runs; an unlabelled block after it is its output."""
SEPARATORS = {"&&", "||", "|", "&", ";"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        text = "\n".join(lines[start + 1 : number])
        found.append(Block(page, start + 1, lines[start][3:].strip(), text, start > 0 and lines[start - 1] == RUN))
        start = None
    assert start is None, f"{page}: a fence is open"
    return found


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The simple commands of a block of shell, as words, without variables that are set for them."""
    text = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        text += line + "\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quote continues in the next line
            continue
        text, command = "", []
        for word in [*words, ";"]:
            if word not in SEPARATORS:
                command.append(word)
                continue
            while command and re.match(r"^\w+=", command[0]):
                command.pop(0)
            if command:
                yield command
            command = []
    assert not text.strip(), f"{block}: a quote is open"


def configs() -> list[tuple[Block, dict[str, Any]]]:
    """Every whole `speculative_config` that is shown as JSON; `..` stands for something left out."""
    found = []
    for block in all_blocks("bash", "", "json"):
        text = re.sub(r"'\$PAIR'|\$PAIR", "PAIR", block.text)
        for start in re.finditer(r'\{"method":', text):
            try:
                value, _ = json.JSONDecoder().raw_decode(text, start.start())
            except ValueError:
                assert ".." in text[start.start() :].split("\n\n")[0], f"{block}: no JSON"
                continue
            found.append((block, value))
    return found


def anchors(page: Path) -> set[str]:
    """Anchors of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[str, str]]:
    """Relative links and anchors of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)", text)
    return [(path, anchor) for path, anchor in found if path or anchor]
