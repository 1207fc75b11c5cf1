"""The Grafana dashboard in examples/: its expressions, and what a real Prometheus answers to them."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.engine.engines import TARGET, tree
from vllm_adaptive_tree.engine.metrics.prometheus import METRICS, PREFIX
from vllm_adaptive_tree.engine.metrics.step_figures import REASONS, StepFigures

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
STEP = StepFigures(
    seconds={"verify": 0.02, "draft": 0.01},
    nodes={"1": 8, "2": 5},
    drafted=20,
    expected=4.5,
    observed=5.0,
    dead=1,
    gauges={"budget_nodes": 13, "draft_levels": 2, "price_tokens_per_second": 70.0, "low_acceptance": 0},
    steps=4,
    tokens=9,
    accepted={"1": 3, "2": 2},
    fallbacks=dict.fromkeys(REASONS, 1),
    asked={"off": 1},
)


def filled(expression: str) -> str:
    """As Grafana sends it."""
    variables = {"${prefix}": "vllm:", "$__rate_interval": "5s", "$model_name": TARGET}
    variables |= dict.fromkeys(("$job", "$instance", "$engine"), ".*")
    for variable, value in variables.items():
        expression = expression.replace(variable, value)
    return expression


def names(expression: str) -> set[str]:
    """Of the metrics that an expression reads."""
    found = set[str]()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)

    promql_parser.walk(promql_parser.parse(filled(expression)), visit)
    return found


REPLICAS = "127.0.0.1", "localhost"
BY = ["job", "instance", "ReplicaId", "WorkerId"]
"""Labels by which replicas of one model differ: Prometheus' own, and those that Ray adds."""


def test_no_expression_sums_replicas_that_share_a_model_name() -> None:
    """Every aggregation keeps them apart, and every selector can be narrowed to one."""
    for expression in EXPRESSIONS.values():
        grouped: list[list[str]] = []
        selected: list[set[str]] = []

        def visit(node: Any, grouped: Any = grouped, selected: Any = selected) -> None:
            if isinstance(node, promql_parser.AggregateExpr):
                grouped.append(list(node.modifier.labels))
            if isinstance(node, promql_parser.VectorSelector):
                selected.append({matcher.name for matcher in node.matchers.matchers})

        promql_parser.walk(promql_parser.parse(filled(expression)), visit)
        assert grouped
        assert all(set(BY) <= set(labels) for labels in grouped), expression
        assert all(labels == {"model_name", "job", "instance", "engine"} for labels in selected), expression


def family(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


@pytest.fixture
def stat_logger() -> Any:
    args = EngineArgs(model=TARGET, dtype="float32", max_model_len=512, speculative_config=tree(12))
    return PrometheusStatLogger(args.create_engine_config(), [0, 1])


def test_every_metric_is_on_it_and_every_name_is_a_metric(stat_logger: Any) -> None:
    exported = {found.name for found in REGISTRY.collect()}
    read = {family(name) for expression in EXPRESSIONS.values() for name in names(expression)}
    assert read <= exported
    assert {PREFIX + name for name in METRICS} <= read
    assert len(EXPRESSIONS) > 20
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in DASHBOARD["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert len({(x, y) for x, y, _, _ in places}) == len(places)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A Prometheus that reads the port of this process every second, as two replicas: its address and that port."""
    binary = shutil.which("prometheus")
    if binary is None:
        assert "PROMETHEUS_REQUIRED" not in os.environ
        pytest.skip("Prometheus is not installed")
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    replicas = [f"{host}:{ports[1]}" for host in REPLICAS]
    job = {"job_name": "vllm", "static_configs": [{"targets": replicas}]}
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
    command = [binary, f"--config.file={file}", f"--storage.tsdb.path={tmp_path}", "--log.level=error"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{ports[0]}"])
    try:
        yield f"http://127.0.0.1:{ports[0]}", ports[1]
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": filled(expression)})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])


def app() -> FastAPI:
    """`/metrics` as `vllm serve` has it. The client library's own server takes the colons out for old scrapers."""
    found = FastAPI()
    attach_router(found)
    return found


OLD = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"
"""What a Prometheus before 3.0 accepts."""


def test_vllms_endpoint_keeps_the_colons_that_the_dashboard_reads(stat_logger: Any) -> None:
    stat_logger.record(SchedulerStats(cudagraph_stats=STEP.stat()), None, engine_idx=0)
    answer = TestClient(app()).get("/metrics", headers={"accept": OLD})
    found = set(re.findall(r"^[\w:]+", answer.text, re.MULTILINE))
    assert {name for expression in EXPRESSIONS.values() for name in names(expression)} <= found
    [prefix] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "prefix"]
    assert prefix["current"]["value"] == PREFIX.removesuffix("adaptive_tree_")
    assert not any(name.startswith("vllm_") for name in found)


def test_a_real_prometheus_answers_every_expression(stat_logger: Any, prometheus: tuple[str, int]) -> None:
    url, port = prometheus
    server = uvicorn.Server(uvicorn.Config(app(), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    drafts = SpecDecodingStats.new(12)
    drafts.observe_draft(num_draft_tokens=12, num_accepted_tokens=5)
    deadline, missing = time.monotonic() + 30, dict(EXPRESSIONS)
    try:
        while missing and time.monotonic() < deadline:
            for engine in (0, 1):
                stats = SchedulerStats(cudagraph_stats=STEP.stat(), spec_decoding_stats=drafts)
                stat_logger.record(stats, None, engine_idx=engine)
            time.sleep(0.5)
            try:
                answers = {name: ask(url, expression) for name, expression in missing.items()}
            except OSError:  # it has not started yet
                continue
            for name, answer in answers.items():
                by_replica = {sample["metric"]["instance"] for sample in answer}
                if len(by_replica) == len(REPLICAS) and all(sample["value"][1] != "NaN" for sample in answer):
                    del missing[name]
        assert not missing
        per_step = ask(url, EXPRESSIONS["Tokens per step A"])
        assert [float(one["value"][1]) for one in per_step] == pytest.approx([9 / 4] * len(REPLICAS))
        by_reason = ask(url, EXPRESSIONS["Steps without a tree, by reason A"])
        assert len(by_reason) == len(REPLICAS) * len(REASONS)
        assert {one["metric"]["reason"]: float(one["value"][1]) for one in by_reason} == pytest.approx(
            dict.fromkeys(REASONS, 1 / 4)
        )
    finally:
        server.should_exit = True
        thread.join()
