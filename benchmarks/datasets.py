"""Prompts of MT-Bench, GSM8K, HumanEval and SPEED-Bench from a local file, as their authors publish it.

One JSON object per line, gzip-compressed or not. Nothing is fetched, and no chat template is applied.
"""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

FORMATS: dict[str, tuple[frozenset[str], Callable[[Record], str]]] = {
    "HumanEval": (frozenset({"task_id", "prompt", "entry_point"}), lambda record: record["prompt"]),
    "GSM8K": (frozenset({"question", "answer"}), lambda record: f"Question: {record['question']}\nAnswer:"),
    "SPEED-Bench": (frozenset({"messages"}), lambda record: record["messages"][0]["content"]),
    "MT-Bench": (frozenset({"question_id", "turns"}), lambda record: record["turns"][0]),
}
"""Format -> keys by which a record is told, and its prompt: of a dialogue the first turn. SPEED-Bench has `messages` as
its script prepares it, and `turns`, as MT-Bench, before."""


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file, in its order.

    Raises:
        ValueError: a line is no record of these formats, or the file has none; names the line.
    """
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        found = [_prompt(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{file} has no prompts")
    return found


def _prompt(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON: {error}; give a file with one object per line") from None
    keys = record.keys() if isinstance(record, Mapping) else frozenset()
    for known, prompt in FORMATS.values():
        if known <= keys:
            try:
                text = prompt(record)
            except (IndexError, KeyError, TypeError):
                break
            if isinstance(text, str) and text:
                return text
            break
    raise ValueError(f"{place} is no record of {', '.join(FORMATS)}: {line[:80]!r}")
