"""`vllm-adaptive-tree view`: the page of a record, in a browser."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.browser import opened
from vllm_adaptive_tree.cli.main import main

HEADER = {"format": 1, "model": "TARGET", "method": "opt_tree", "nodes": 5, "runner": "V1"}
STEPS: list[dict[str, Any]] = [
    {
        "step": 1,
        "time": 1.0,
        "texts": {"5": " a", "6": "</script><b>", "7": "\n", "8": "é"},
        "requests": [
            {
                "request": "first",
                "position": 9,
                "tokens": [5, 6, 7, 8, 5],
                "parents": [-1, -1, 0, 2, 1],
                "values": [0.5, 0.25, 0.4, 0.3, 0.1],
                "verified": 4,
                "accepted": [0, 2],
                "emitted": [5, 7, 6],
                "given": "<i>x =",
            },
            {
                "request": "second",
                "position": 3,
                "tokens": [8],
                "parents": [-1],
                "values": [0.9],
                "verified": 0,
                "accepted": [],
                "emitted": [5],
            },
        ],
    },
    {
        "step": 2,
        "time": 2.0,
        "texts": {},
        "requests": [
            {
                "request": "first",
                "position": 12,
                "tokens": [8],
                "parents": [-1],
                "values": [0.75],
                "verified": 1,
                "accepted": [0],
                "emitted": [8, 5],
            }
        ],
    },
]
STATES = "[...document.querySelectorAll('#tree g')].map((one) => [Number(one.dataset.node), one.className.baseVal])"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Its last line was not written to the end."""
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *STEPS)) + '{"step": 3, "requests": [{"req')
    return file


def test_a_page_and_its_keys(record: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["view", str(record), "--out", str(out)]) == 0
    with opened(out, tmp_path / "profile") as page:
        assert "opt_tree, at most 5 nodes" in page.value("document.getElementById('engine').textContent")
        drawn = [
            [-1, "root"],
            [0, "accepted"],
            [1, "verified"],
            [2, "accepted"],
            [3, "verified"],
            [4, "cut"],
            [5, "own"],
        ]
        assert page.value(STATES) == drawn
        labels = page.value("[...document.querySelectorAll('#tree text')].map((one) => one.textContent)")
        assert labels[:5] == ["root", "␣a", "0.500", "</script><b>", "0.250"]
        assert labels[-1] == "</script><b>"
        assert page.value("document.querySelectorAll('#tree path').length") == 6
        assert page.value("document.getElementById('overall').textContent").startswith("3 trees, 2.00 tokens each")
        assert page.value("document.querySelectorAll('b').length") == 0, "text of tokens is no markup"
        assert page.value("document.getElementById('summary').textContent") == (
            "5 nodes drafted, 4 verified, 1 cut; 2 accepted, 3 tokens emitted"
        )
        page.press("c")
        assert page.value(STATES) == [*drawn[:5], drawn[6]]
        page.press("ArrowRight")
        assert page.value(STATES) == [[-1, "root"], [0, "accepted"], [1, "own"]]
        assert page.value("document.querySelector('#tree text').textContent") == "</script><b>", "of the step before"
        assert page.value("document.getElementById('text').textContent") == "<i>x = a\n</script><b>é a"
        assert page.value("document.querySelector('#text .given').textContent") == "<i>x ="
        drafted = "[...document.querySelectorAll('#text .drafted')].map((one) => one.textContent)"
        assert page.value(drafted) == [" a", "\n", "é"]
        for key, where in (("ArrowRight", "step 2 of 2"), ("Home", "step 1 of 2"), ("End", "step 2 of 2")):
            page.press(key)
            assert page.value("document.getElementById('where').textContent").startswith(where)
        page.press("ArrowDown")
        assert page.value("document.getElementById('request').value") == "second"
        page.press("c")
        assert page.value(STATES) == [[-1, "root"], [0, "cut"], [1, "own"]]
        page.press("ArrowUp")
        assert page.value("document.getElementById('request').value") == "first"
        assert page.errors == []


DRAWN = """
const step = {tokens: [1, 2, 3, 4], parents: [-1, -1, 0, 0], values: [1, 1, 1, 1], verified: 3, accepted: [0],
  emitted: [1, 9], root: null, end: 0, places: [[0, 0], [1, 0], [1, 3], [2, 0], [2, 1], [2, 2]]};
console.log(JSON.stringify(nodes(step, true).map((one) => [one.node, one.depth, one.row, one.state])));
console.log(short("a long name", 6), short("name", 6));
"""


def test_the_nodes_of_a_page(record: Path, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        assert "BROWSER_REQUIRED" not in os.environ
        pytest.skip("Node.js is not installed")
    out = record.with_suffix(".html")
    assert main(["view", str(record)]) == 0
    script = re.search(r'<script id="viewer">(.*?)</script>', out.read_text(), re.DOTALL)
    assert script is not None
    run = subprocess.run([node, "-e", script[1] + DRAWN], capture_output=True, text=True, check=True)
    drawn, names = run.stdout.splitlines()
    assert json.loads(drawn) == [
        [-1, 0, 0, "root"],
        [0, 1, 0, "accepted"],
        [1, 1, 3, "verified"],
        [2, 2, 0, "verified"],
        [4, 2, 2, "own"],
    ]
    assert names == "a lon… name"


def test_the_last_trees_alone(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(record), "--last", "2"]) == 0
    assert "2 trees" in capsys.readouterr().out
    found = re.search(r'type="application/json">(.*?)</script>', record.with_suffix(".html").read_text(), re.DOTALL)
    assert found is not None
    shown = json.loads(found[1])
    assert [one["request"] for one in shown["steps"]] == ["second", "first"]
    assert shown["given"] == {"first": "<i>x = a\n</script><b>", "second": ""}
    assert shown["summary"] == "2 trees, 1.50 tokens each; accepted at depth 1: 50%; of them child 1: 100%"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a record"),
        ("[1, 2]\n", "is not a record"),
        ('{"format": 2}\n', "is not a record"),
        (json.dumps(HEADER) + '\n{"step": 1, "texts": {}, "requests": [{}]}\n', "is not a record"),
        (json.dumps(HEADER) + "\n", "holds no tree"),
    ],
)
def test_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    assert main(["view", str(file)]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
