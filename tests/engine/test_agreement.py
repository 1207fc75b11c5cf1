"""Both model runners emit the same tokens for a table of options, and they are those of vLLM without speculation.

Greedy in float32: what is sampled differs between the runners without speculation too.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.agreement import COVERED, REQUESTS, ROWS, Found, Row, found
from tests.engine.engines import V2, Engines, assert_identical

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(V2, reason="it starts the other runner itself")]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """Those that are selected."""
    asked = [item.callspec.params.get("row") for item in request.session.items if item.path == request.path]
    return [row for row in ROWS if row in asked]


@pytest.fixture(scope="module")
def on_v2(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, Found]]]:
    """Model Runner V2 works in another process meanwhile; asked for its results, the test waits."""
    file = tmp_path_factory.mktemp("agreement") / "v2"
    command = [sys.executable, "-m", "tests.engine.agreement", str(file), *map(str, rows)]
    with open(f"{file}.log", "w") as log:
        process = subprocess.Popen(command, env={**os.environ, "MODEL_RUNNER": "v2"}, cwd=ROOT, stdout=log, stderr=log)

    def results() -> dict[str, Found]:
        assert process.wait() == 0, file.with_suffix(".log").read_text()[-8000:]
        return pickle.loads(file.read_bytes())

    yield results
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def on_v1(rows: list[Row], on_v2: Any, engines: Engines) -> dict[str, Found]:
    return {str(row): found(engines, row) for row in [None, *rows]}


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in COVERED), id=str(row)) for row in ROWS]
)
def test_v1_v2_and_no_speculation(
    on_v1: dict[str, Found], on_v2: Callable[[], dict[str, Found]], row: Row, requests: str
) -> None:
    plain, v1, v2 = on_v1["None"], on_v1[str(row)], on_v2()[str(row)]
    for name, ours in (("v1", v1), ("v2", v2)):
        assert ours.runner == f"vllm_adaptive_tree.engine.{name}.runner"
        assert_identical(plain.outputs[requests], ours.outputs[requests])
        assert ours.accepted > 10
    assert_identical(v1.outputs[requests], v2.outputs[requests])


@pytest.mark.parametrize("requests", REQUESTS)
def test_the_requests_differ(on_v1: dict[str, Found], requests: str) -> None:
    """The table would say nothing of a processor that changes no token."""
    plain = on_v1["None"].outputs
    changed = [a.token_ids != b.token_ids for a, b in zip(plain[requests], plain["argmax"], strict=True)]
    assert all(changed) == (requests != "argmax")
