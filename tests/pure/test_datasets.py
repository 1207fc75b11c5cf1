"""Files of the benchmarks that papers report, a line or two of each as their authors publish them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.datasets import FORMATS, read_prompts

SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "MT-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write a blog post.", "Rewrite it."]},
        "Write a blog post.",
    ),
    "GSM8K": (
        {"question": "A robe takes 2 bolts. How many?", "answer": "It takes 2.\n#### 2"},
        "Question: A robe takes 2 bolts. How many?\nAnswer:",
    ),
    "HumanEval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def add(a, b):\n",
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
            "test": "",
        },
        "def add(a, b):\n",
    ),
    "SPEED-Bench": (
        {"question_id": "a", "category": "math", "messages": [{"role": "user", "content": "Prove it."}]},
        "Prove it.",
    ),
    "SPEED-Bench, not prepared": (
        {"question_id": "a", "category": "math", "turns": ["Prove it."], "multiturn": False},
        "Prove it.",
    ),
}


def test_every_format_has_a_sample() -> None:
    assert FORMATS.keys() <= SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("packed", [False, True])
def test_prompts(tmp_path: Path, name: str, packed: bool) -> None:
    record, prompt = SAMPLES[name]
    text = json.dumps(record) + "\n\n" + json.dumps(record) + "\n"
    file = tmp_path / ("test.jsonl.gz" if packed else "test.jsonl")
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert read_prompts(file) == [prompt, prompt]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ('{"text": "x"}', "line 1 is no record of HumanEval, GSM8K, SPEED-Bench, MT-Bench"),
        ('{"question_id": 1, "turns": []}', "line 1 is no record"),
        ("[1]", "line 1 is no record"),
        ('{"question": "x", "answer": "y"}\nx', "line 2 is no JSON"),
    ],
)
def test_other_files(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_prompts(file)
