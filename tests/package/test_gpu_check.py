"""`make gpu-check`: a part that fails or hangs leaves the others their figures; a rehearsal on a CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import check
from benchmarks.gpu.check import PARTS, Part, main, markdown, run

ROOT = Path(__file__).parents[2]
NO_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


def python(program: str, **rest: Any) -> Part:
    return Part("part", [sys.executable, "-c", program, "{out}"], **{"minutes": 1.0, **rest})


def test_a_part(tmp_path: Path) -> None:
    writes = "import sys, json; json.dump([1], open(sys.argv[1] + '/found.json', 'w'))"
    found = run(python(writes, result="found.json"), tmp_path, rehearse=False)
    assert found["passed"]
    assert found["result"] == [1]
    found = run(python("import sys; sys.exit('no kernel')"), tmp_path, rehearse=False)
    assert (found["passed"], found["code"], found["log"]) == (False, 1, "no kernel\n")
    found = run(python("import time; time.sleep(60)", minutes=0.01), tmp_path, rehearse=False)
    assert (found["passed"], found["code"]) == (False, -9)
    assert run(python("", needs=("nobody",)), tmp_path, rehearse=False) == {"left out": "needs nobody"}
    assert "left out" in run(python(""), tmp_path, rehearse=True)


def test_all_parts_fit() -> None:
    assert sum(part.minutes for part in PARTS) == 25, "as docs/gpu.md says"


def test_the_table() -> None:
    row = {"method": "none", "margins": [0.125], "host_ms": 1.5, "launches": {"kernels": 7.0, "graphs": 1.0}}
    wrong, right = ({**row, "method": method, "good": method == "eagle2"} for method in ("opt_tree", "eagle2"))
    estimates = {"median": 1.5, "low": 1.4, "high": 1.625}, {"median": 1.1, "low": 0.9, "high": 1.2}
    compared = dict(zip(("to_base", "to_best_chain"), estimates, strict=True)) | {"best_chain": "chain 3"}
    plain = {"cell": "offline 1 T=0", "config": "none", "tokens_per_second": {"median": 8.2}, "to_best_chain": None}
    speed = {"cell": "offline 1 T=0", "config": "opt_tree", "tokens_per_second": {"median": 12.34}, **compared}
    parts = {
        "self check": {"passed": True, "seconds": 9, "code": 0},
        "engine": {"passed": True, "seconds": 9, "code": 0, "result": {"rows": [row, wrong, right]}},
        "model": {"passed": False, "seconds": 9, "code": 1, "result": {"rows": [plain, speed]}},
        "head": {"left out": "needs rich"},
    }
    found = markdown({"version": "0.2", "device": "a GPU", "parts": parts})
    first = found.split("| part |")[0].splitlines()
    assert first[4:-1] == [
        "| starts, and passes its check | yes |",
        "| says what vLLM says, without a wait | 1 of 2 methods |",
        "| model, offline 1 T=0: opt_tree of none, and of chain 3 | 1.50 [1.40, 1.62] and 1.10 [0.90, 1.20] |",
    ]
    nothing = markdown({"version": "0.2", "device": "a GPU", "parts": {}})
    assert "| starts, and passes its check | - |" in nothing
    for line in (
        "| engine | yes | 9 |",
        "| model | no (1) | 9 |",
        "| head | needs rich |  |",
        "| none | 1 | 0.125 | 1.5 | 7.0 | 1.0 |",
        "| offline 1 T=0 | opt_tree | 12.3 |",
    ):
        assert line in found.splitlines()


@NO_DEVICE
def test_it_needs_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 2
    assert "REHEARSE=1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@NO_DEVICE
@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert main(["--rehearse", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    parts = json.loads(file.read_text())["parts"]
    assert parts.keys() == {part.name for part in check.PARTS}
    none, tree = parts["engine"]["result"]["rows"]
    assert none["margins"] == tree["margins"] == []
    assert 0 < tree["steps"] < none["steps"]
