"""`vllm-adaptive-tree bench` with real engines, as small as it can be."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import DRAFT, TARGET
from vllm_adaptive_tree.bench.offline import Setup
from vllm_adaptive_tree.bench.plan import BASE, Cell, Config
from vllm_adaptive_tree.bench.process import EngineProcess
from vllm_adaptive_tree.bench.rounds import Store
from vllm_adaptive_tree.bench.server import Server
from vllm_adaptive_tree.bench.workloads import standard_library
from vllm_adaptive_tree.cli.main import main

TOKENS, PER_SLOT = 6, 2
REQUESTS = 2 * PER_SLOT
FIXED = {"method": "opt_tree", "num_speculative_tokens": 6, "tree": {"threshold": 0, "budget": 12}}
CONFIG = f"fixed={json.dumps(FIXED)}"
SMALL = ["--methods", "", "--config", CONFIG, "--chains", "", "--concurrency", "2", "--sampled", "", "--server", ""]
SMALL += ["--eager", "--dtype", "float32", "--max-tokens", str(TOKENS), "--max-model-len", "256"]
SMALL += ["--requests-per-slot", str(PER_SLOT)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "out"
    assert main(["bench", *SMALL, "--out", str(folder)]) == 0
    return folder


def test_a_run(out: Path) -> None:
    report = json.loads((out / "results.json").read_text())
    plain, ours = report["rows"]
    assert (plain["config"], ours["config"]) == (BASE, "fixed")
    assert plain["rounds"] == ours["rounds"] == 5
    assert ours["identical"] == 1
    assert ours["to_base"]["median"] > 0
    assert plain["to_base"] is None
    assert plain["tokens_per_step"] == 1 < ours["tokens_per_step"]
    assert plain["nodes_per_step"] == 0
    assert 5 < ours["nodes_per_step"] <= 6
    assert sum(ours["nodes_by_depth"].values()) == pytest.approx(ours["nodes_per_step"])
    assert 0 < sum(ours["phases"].values()) < ours["step"]
    assert plain["memory"] > 2**28
    for measurement in (one.measured[name] for one in Store.open(out, settings(out)).rounds for name in one.measured):
        assert measurement.tokens == REQUESTS * TOKENS
        assert measurement.steps >= measurement.decode_steps / 2
    assert "| fixed |" in (out / "results.md").read_text()


def settings(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "settings.json").read_text())
    return found


def test_a_finished_run_starts_no_engine(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineProcess, "__init__")
    before = (out / "rounds.jsonl").read_text()
    assert main(["bench", *SMALL, "--out", str(out)]) == 0
    assert (out / "rounds.jsonl").read_text() == before


def test_other_arguments_are_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--max-tokens", "7", "--out", str(out)]) == 2
    assert "max_tokens: 6 there, 7 now" in capsys.readouterr().err


@pytest.fixture
def setup() -> Setup:
    return Setup(TARGET, "float32", True, 2, 512, TOKENS, standard_library(), max_model_len=256)


@pytest.fixture
def server(setup: Setup, tmp_path: Path) -> Iterator[Server]:
    config = Config("fixed", "method", {**FIXED, "model": DRAFT})
    server = Server(config, setup, tmp_path / "log")
    try:
        yield server
    finally:
        server.close()
        assert server.process.poll() is not None


def test_the_server_says_the_same(out: Path, server: Server) -> None:
    cell = Cell("server", 2, requests=REQUESTS)
    server.measure(cell, 0)
    found = server.measure(cell, 1)
    offline = Store.open(out, settings(out)).rounds[0].measured["fixed"]
    assert found.outputs == offline.outputs
    assert (found.tokens, found.nodes, found.accepted) == (offline.tokens, offline.nodes, offline.accepted)
    assert found.steps >= offline.steps
    assert found.phases.keys() == offline.phases.keys()
    assert found.depths == offline.depths


def test_an_engine_that_does_not_start(setup: Setup, tmp_path: Path) -> None:
    config = Config("broken", "method", {**FIXED, "model": DRAFT, "tree": {"treshold": 0}})
    with pytest.raises(RuntimeError, match="'broken' failed: .*'treshold'.* is not an option"):
        EngineProcess(config, setup, tmp_path / "log")
    assert "treshold" in (tmp_path / "log").read_text()
