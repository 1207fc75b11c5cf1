"""The package in processes that did not ask for it, and a tree's configuration in processes that loaded no plugin."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.engines import DRAFT, ENGINE, PROMPTS, TARGET, V2, Engines, generate, tree
from vllm_adaptive_tree.engine.mark import Mark
from vllm_adaptive_tree.engine.metrics.step_figures import StepFigures
from vllm_adaptive_tree.engine.names import MARK
from vllm_adaptive_tree.versions import window

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
    {"temperature": 0.9, "seed": 5, "min_p": 0.1, "max_tokens": 24, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
]


def run(script: str, *arguments: str, **environment: str) -> Any:
    """JSON that a script prints in its last line, in a process of its own."""
    code = f"import json, os, sys\n{script}\nif __name__ == '__main__':\n    print(json.dumps(main()))\n"
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def config(spec: Any = None, **arguments: Any) -> Any:
    return EngineArgs(model=TARGET, speculative_config=spec, **ENGINE, **arguments).create_engine_config()


# -- installed and not asked for


STOCK = """
from vllm import LLM, SamplingParams

def main():
    target, engine, prompts, params = json.loads(sys.argv[1])
    llm = LLM(target, **engine)
    outputs = llm.generate(prompts, [SamplingParams(**one) for one in params], use_tqdm=False)
    assert "vllm_adaptive_tree" not in sys.modules
    return [list(output.outputs[0].token_ids) for output in outputs]
"""


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    """vLLM's answers in a process that loads no plugin."""
    return run(STOCK, json.dumps([TARGET, ENGINE, PROMPTS[:3], PARAMS]), VLLM_PLUGINS="")


@pytest.mark.skipif(V2, reason="of the plugin, which knows no runner")
def test_a_stock_engine_answers_as_without_the_package(stock: list[list[int]], engines: Engines) -> None:
    llm = engines.start()
    assert hasattr(EngineArgs.create_engine_config, "_adaptive_tree")
    outputs = generate(llm, PROMPTS[:3], [SamplingParams(**one) for one in PARAMS])
    engines.shutdown()
    assert [list(output.token_ids) for output in outputs] == stock


LOADED = """
import logging, types
import vllm, vllm.plugins
import vllm.distributed.ec_transfer.ec_connector.metrics
import vllm.entrypoints.llm
import vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.metrics.ray_wrappers
import vllm.v1.worker.cpu_worker, vllm.v1.worker.gpu.model_runner
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics import loggers

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm":
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, key, own): held for own, held in vars(value).items()}
    return found

LINES = []

class Kept(logging.Handler):
    def emit(self, record):
        LINES.append([record.levelname, record.getMessage()])

def loading(version):
    \"\"\"Which attributes of vLLM another process has after loading its plugins, and what the log says.\"\"\"
    vllm.__version__, vllm.plugins.plugins_loaded = version, False
    LINES.clear()
    logger = logging.getLogger("vllm.vllm_adaptive_tree.engine.plugin")
    logger.handlers, logger.level = [Kept()], logging.INFO  # vLLM resets them with every configuration it builds
    before = attributes()
    vllm.plugins.load_general_plugins()
    after = attributes()
    changed = [".".join(key) for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    return {"changed": [key for key in changed if key != "vllm.plugins.plugins_loaded"], "lines": list(LINES)}

def asking(method):
    try:
        EngineArgs(model=sys.argv[1], dtype="float32", max_model_len=256, speculative_config={
            "method": method, "model": sys.argv[2], "num_speculative_tokens": 3}).create_engine_config()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return "built"

def main():
    assert not hasattr(EngineArgs.create_engine_config, "_adaptive_tree")
    assert len(attributes()) > 10_000
    own, real = EngineArgs.create_engine_config, vllm.__version__
    os.environ["VLLM_PLUGINS"] = "adaptive_tree"  # and none of vLLM's own
    found = {}

    found["other"] = loading("0.29.0")
    found["other tree"], found["other chain"] = asking("opt_tree"), asking("draft_model")
    EngineArgs.create_engine_config = own

    del EngineArgs.create_engine_config
    found["no entry"] = loading(real)
    EngineArgs.create_engine_config = own

    found["supported"] = loading(real)
    reader = loggers.PrometheusStatLogger
    del loggers.PrometheusStatLogger
    found["no reader"] = loading(real)
    found["no reader tree"], found["no reader chain"] = asking("opt_tree"), asking("draft_model")
    loggers.PrometheusStatLogger = reader
    found["again"] = loading(real)
    found["tree"] = asking("opt_tree")
    return found
"""
ONE = "vllm.engine.arg_utils.EngineArgs.create_engine_config"


@pytest.mark.skipif(V2, reason="of the plugin, which knows no runner")
def test_loading_changes_one_function_and_never_raises() -> None:
    found = run(LOADED, TARGET, DRAFT, VLLM_PLUGINS="")

    assert found["supported"] == {"changed": [ONE], "lines": []}
    assert found["again"] == {"changed": [], "lines": []}
    assert found["tree"] == "built"

    (line,) = found["other"]["lines"]
    assert line[0] == "INFO"
    assert f"supports vLLM {window()}" in line[1]
    assert "vLLM 0.29.0" in line[1]
    assert found["other"]["changed"] == [ONE]
    kind, message = found["other tree"]
    assert kind == "RuntimeError"
    assert "this is vLLM 0.29.0. Get a matching one with pip install --find-links dist 'vllm-adaptive-tree[" in message
    assert found["other chain"] == "built"

    (line,) = found["no entry"]["lines"]
    assert line[0] == "WARNING"
    assert "create_engine_config" in line[1]
    assert found["no entry"]["changed"] == []

    assert found["no reader"] == {"changed": [], "lines": []}
    kind, message = found["no reader tree"]
    assert kind == "RuntimeError"
    assert "PrometheusStatLogger" in message
    assert found["no reader chain"] == "built"


def test_in_another_release_nothing_but_its_version_is_imported(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.12.0'\n")
    script = """
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout)

def main():
    from vllm_adaptive_tree.engine.plugin import register
    register()
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]
"""
    paths = [str(tmp_path), str(Path(TARGET).parents[2])]
    assert run(script, PYTHONPATH=os.pathsep.join(paths)) == ["vllm"]


# -- the configuration in another process


def test_the_mark_survives_what_processes_do_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original, plain = config(tree(12)), config()
    mark = getattr(original.speculative_config, MARK)
    for copied in (
        pickle.loads(pickle.dumps(original)),
        cloudpickle.loads(cloudpickle.dumps(original)),
        copy.copy(original),
        copy.deepcopy(original),
    ):
        assert getattr(copied.speculative_config, MARK) == mark
        assert isinstance(mark, Mark)
        assert copied.speculative_config == original.speculative_config
        assert copied.compute_hash() == original.compute_hash() != plain.compute_hash()
    monkeypatch.setattr("vllm.__version__", "0.29.0")
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.32.*this is vLLM 0\.29\.0\. Get a matching one"):
        pickle.loads(pickle.dumps(original))


FRONT_END = """
import asyncio, copy, pickle

async def ask(engine, name, prompts, params):
    from vllm import SamplingParams

    async def one(index):
        async for output in engine.generate(prompts[index], SamplingParams(**params[index]), f"{name}-{index}"):
            last = output
        return list(last.outputs[0].token_ids)

    return await asyncio.gather(*map(one, range(len(prompts))))

def nodes():
    from prometheus_client import REGISTRY
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:adaptive_tree_nodes_total")

async def serve(config, prompts, params):
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    def start():
        return AsyncLLM(vllm_config=config, executor_class=Executor.get_class(config), log_stats=True)

    found = {}
    first = start()
    found["first"], found["first nodes"] = await ask(first, "a", prompts, params), nodes()
    os.environ.pop("VLLM_PLUGINS")  # the second engine's core process loads the plugin, too
    second = start()
    found["second"], found["second nodes"] = await ask(second, "b", prompts, params), nodes()
    found["both"] = await ask(first, "c", prompts[:1], params[:1])
    first.shutdown()
    second.shutdown()
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    PrometheusStatLogger(config)
    found["after shutdown"] = nodes()
    return found

def main():
    path, prompts, params = json.loads(sys.argv[1])
    data = open(path, "rb").read()
    sys.modules["vllm_adaptive_tree"] = None
    try:
        pickle.loads(data)
    except ImportError as error:
        absent = str(error)
    del sys.modules["vllm_adaptive_tree"]
    config = pickle.loads(data)
    return {"absent": absent, **asyncio.run(serve(config, prompts, params))}
"""


@pytest.mark.skipif(V2, reason="the interpreter is slow")
def test_a_front_end_that_is_given_the_configuration(stock: list[list[int]], tmp_path: Path) -> None:
    """As Ray Serve does it: built and pickled elsewhere, no EngineArgs, no plugin, statistics on, two engines."""
    file = tmp_path / "config"
    file.write_bytes(pickle.dumps(config(tree(12))))
    found = run(
        FRONT_END,
        json.dumps([str(file), PROMPTS[:3], PARAMS]),
        VLLM_PLUGINS="",
        VLLM_LOGGING_LEVEL="INFO",  # below it vLLM builds no log of statistics
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )
    assert "vllm_adaptive_tree" in found["absent"]
    assert found["first"] == found["second"] == stock
    assert found["both"] == stock[:1]
    assert found["first nodes"] > 0
    assert found["second nodes"] > 0
    assert found["after shutdown"] == 0


# -- readers of our figures


STEP = StepFigures(
    seconds={"verify": 0.25},
    nodes={"1": 2, "2": 1},
    expected=1.5,
    observed=2.0,
    dead=3,
    gauges={"draft_levels": 4},
)


def figures(**changes: Any) -> SchedulerStats:
    """Statistics of a step as they arrive from an engine in another process."""
    sent = SchedulerStats(cudagraph_stats=STEP.stat(), **changes)
    arrived = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    assert isinstance(arrived, SchedulerStats)
    return arrived


def counted(depth: str, engine: str = "0") -> float | None:
    return REGISTRY.get_sample_value(
        "vllm:adaptive_tree_nodes_total", {"model_name": TARGET, "engine": engine, "depth": depth}
    )


def test_readers_of_vllm_that_are_not_ours_ignore_the_figures() -> None:
    marked = config(tree(12))
    log = LoggingStatLogger(marked)
    log.record(figures(), IterationStats())
    log.log()
    prometheus = object.__new__(PrometheusStatLogger)
    PrometheusStatLogger.__init__.__wrapped__(prometheus, marked)
    PrometheusStatLogger.record.__wrapped__(prometheus, figures(), IterationStats())
    assert counted("1") is None
    PrometheusStatLogger.record(prometheus, figures(), IterationStats())  # made before a tree method was asked for
    assert counted("1") is None


def test_every_engine_counts_once_and_a_new_logger_starts_anew() -> None:
    marked = config(tree(12))
    loggers = [PrometheusStatLogger(marked, [0, 1]) for _ in range(2)]  # vLLM's rule: the last one is exported
    for stat_logger in loggers:
        stat_logger.record(figures(), IterationStats(), engine_idx=1)
    assert (counted("1", "1"), counted("2", "1"), counted("1", "0")) == (2, 1, None)
    loggers[1].record(figures(), None, None, 0)
    loggers[1].record(None, None)
    assert (counted("1", "1"), counted("1", "0")) == (2, 2)
    PrometheusStatLogger(config())
    assert counted("1") is None


def test_figures_that_cannot_be_read_end_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.engine.metrics import prometheus as metrics
    from vllm_adaptive_tree.engine.metrics import step_figures

    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "exception", said.append)
    stat_logger = PrometheusStatLogger(config(tree(12)))
    stat_logger.record(figures(), None)
    broken = figures()
    monkeypatch.setattr(step_figures, "KEY", "of_another_release")
    for _ in range(2):
        stat_logger.record(broken, None)
    assert counted("1") == 2
    assert len(said) == 1


class Metric:
    """Of a logger that is not Prometheus', as Ray's are."""

    made: dict[str, "Metric"] = {}  # noqa: RUF012

    def __init__(self, name: str, **_: Any):
        self.values: dict[tuple[str, ...], list[float]] = {}
        self.made[name] = self

    def labels(self, *labels: Any, **named: Any) -> "Metric":
        child = object.__new__(type(self))
        child.values, child.key = self.values, tuple(map(str, (*labels, *named.values())))  # type: ignore[attr-defined]
        return child

    def inc(self, value: float = 1) -> None:
        self.values.setdefault(self.key, []).append(value)  # type: ignore[attr-defined]

    observe = set = inc

    def set_to_current_time(self) -> None: ...


def test_a_logger_with_other_metrics_has_ours_of_its_kind() -> None:
    parts = ("spec_decoding", "kv_connector", "ec_connector", "perf_metrics")
    kinds = dict.fromkeys(("_gauge_cls", "_counter_cls", "_histogram_cls"), Metric)
    own = {f"_{part}_cls": type(part, (getattr(PrometheusStatLogger, f"_{part}_cls"),), dict(kinds)) for part in parts}
    other = type("Other", (PrometheusStatLogger,), {**kinds, **own})
    other(config(tree(12))).record(figures(), IterationStats())
    assert Metric.made["vllm:adaptive_tree_nodes"].values == {(TARGET, "0", "1"): [2], (TARGET, "0", "2"): [1]}
    assert Metric.made["vllm:adaptive_tree_draft_levels"].values == {(TARGET, "0"): [4]}
    assert Metric.made["vllm:adaptive_tree_phase_seconds"].values == {(TARGET, "0", "verify"): [0.25]}
    assert counted("1") is None


def test_rays_logger_has_rays_metrics() -> None:
    pytest.importorskip("ray.serve")
    from ray.util import metrics
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    for _ in range(2):  # Ray has one registry for all engines of a process
        stat_logger = RayPrometheusStatLogger(config(tree(12)))
        stat_logger.record(figures(), IterationStats())
    assert isinstance(stat_logger.tree_prom.metrics["nodes"].metric, metrics.Counter)
    assert isinstance(stat_logger.tree_prom.metrics["phase_seconds"].metric, metrics.Histogram)
    assert counted("1") is None
