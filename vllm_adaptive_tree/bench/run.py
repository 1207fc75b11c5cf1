"""Run of `vllm-adaptive-tree bench`: from command-line options to a plan, its rounds and a report."""

import os
import platform
import sys
import time
from argparse import Namespace
from typing import Any

from vllm_adaptive_tree.bench.environment import shown
from vllm_adaptive_tree.bench.first import measure_first
from vllm_adaptive_tree.bench.models import chain, enlarged, random_draft
from vllm_adaptive_tree.bench.offline import Setup
from vllm_adaptive_tree.bench.plan import BASE, Cell, Config, Role, Stage, stages
from vllm_adaptive_tree.bench.process import EngineProcess
from vllm_adaptive_tree.bench.progress import Progress
from vllm_adaptive_tree.bench.projection import read_hardware
from vllm_adaptive_tree.bench.report import report
from vllm_adaptive_tree.bench.rounds import Store
from vllm_adaptive_tree.bench.schedule import Engine, Schedule
from vllm_adaptive_tree.bench.server import Server
from vllm_adaptive_tree.bench.workloads import checksum, standard_library
from vllm_adaptive_tree.proposers import RECOMMENDED
from vllm_adaptive_tree.version import __version__

COLD = {"cost_profile": None}
"""Options of tree methods, unless a --config sets others: a run must not depend on the profiles of earlier ones."""
RECORDED = (
    *("enlarge_to", "dtype", "eager", "nodes", "methods", "chains", "random_draft", "self_draft", "concurrency"),
    *("sampled", "server", "first_steps", "requests_per_slot", "max_tokens", "max_model_len"),
)
"""Options that the rounds depend on and that are recorded as given."""


def run(options: Namespace) -> int:
    """Run the benchmark. Returns 1 if something did not run, 130 if interrupted, else 0.

    Raises:
        ValueError: options contradict each other, or --out belongs to another run.
        OSError: a file cannot be read or written.
    """
    found, first, hardware = cells(options), first_cells(options), [read_hardware(file) for file in options.project]
    check_names(options)
    settings = settings_of(options)
    store = Store.open(options.out, settings)
    target, size = options.model, None
    if options.enlarge_to:
        target, size = enlarged(options.model, options.out / "models", options.enlarge_to)
    compared = configs(options, target)
    setup = Setup.of(
        compared,
        max(cell.concurrency for cell in [*found, *first]),
        model=target,
        dtype=options.dtype,
        eager=options.eager,
        max_model_len=options.max_model_len,
        max_tokens=options.max_tokens,
        prompts=options.prompts or standard_library(),
        phase_seconds=options.bursty_seconds,
    )
    logs = options.out / "logs"
    logs.mkdir(exist_ok=True)

    def start(stage: Stage, config: Config) -> Engine:
        log = logs / f"{'server' if stage.served else 'offline'} {config.name}.log".replace(" ", "-").replace("/", "-")
        return Server(config, setup, log) if stage.served else EngineProcess(config, setup, log)

    def start_offline(config: Config) -> Engine:
        return start(Stage(False, (config,), ()), config)

    interrupted, deadline = False, time.monotonic() + 60 * options.minutes
    with Progress(quiet=options.quiet) as progress:
        schedule = Schedule(stages(compared, found), store, options.rounds, 60 * options.minutes, start, progress)
        try:
            schedule.run()
        except KeyboardInterrupt:
            interrupted = True
        for cell in first if not interrupted else []:
            for config in compared:
                if config.role == "method":
                    measure_first(
                        cell, config, store, options.rounds, start_offline, lambda: time.monotonic() < deadline
                    )
    about = {**settings, "enlarged": size and {"parameters": size}}
    report(options.out, about, found, compared, store.rounds, hardware, schedule.failures, first, as_json=options.json)
    if left := schedule.turns():
        print(f"{left} rounds of an engine are left; the same command goes on there.", file=sys.stderr)
    for stage, reason in schedule.failures.items():
        print(f"did not run: {stage}: {reason}", file=sys.stderr)
    return 130 if interrupted else 1 if schedule.failures else 0


def cells(options: Namespace) -> list[Cell]:
    """Cells of the options. Raises ValueError if no load is asked for."""

    def requests(count: int) -> int | None:
        return options.requests_per_slot and options.requests_per_slot * count

    found = [Cell("offline", count, requests=requests(count)) for count in options.concurrency]
    found += [Cell("offline", count, sampled=True, requests=requests(count)) for count in options.sampled]
    found += [Cell("bursty", options.bursty)] if options.bursty else []
    found += [Cell("server", count, requests=requests(count)) for count in options.server]
    if not found and not options.first_steps:
        raise ValueError("nothing to measure: give --concurrency, --sampled, --server, --bursty or --first-steps")
    return found


def first_cells(options: Namespace) -> list[Cell]:
    return [Cell("first", count, requests=count) for count in options.first_steps]


def configs(options: Namespace, target: str) -> list[Config]:
    def tree(name: str, role: Role, draft: str, method: str) -> Config:
        speculation = {"method": method, "model": draft, "num_speculative_tokens": options.nodes}
        return Config(name, role, {**speculation, "tree": {"budget": "auto", **COLD}})

    found = [Config(BASE, "base", None)]
    for count in options.chains:
        found.append(Config(f"chain {count}", "chain", chain(target, options.draft, count)))
    found += [tree(method, "method", options.draft, method) for method in options.methods]
    for name, given in options.config:
        speculation = {"model": options.draft, **given, "tree": {**COLD, **given.get("tree", {})}}
        found.append(Config(name, "method", speculation))
    first = next(iter(options.methods), RECOMMENDED)
    if options.random_draft:
        found.append(tree("random draft", "stress draft", random_draft(options.draft, options.out / "models"), first))
    if options.self_draft:
        found.append(tree("self draft", "stress draft", target, first))
    return found


def check_names(options: Namespace) -> None:
    """Check names; raises ValueError if two configurations have the same one."""
    names = [BASE, *(f"chain {count}" for count in options.chains), *options.methods]
    names += [*(name for name, _ in options.config), "random draft", "self draft"]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two configurations have the name {twice[0]!r}; rename one")


def settings_of(options: Namespace) -> dict[str, Any]:
    """Settings that the rounds depend on; more rounds and more minutes resume a run with the same settings."""
    import vllm

    return {
        "version": __version__,
        "vllm": vllm.__version__,
        "processor": platform.machine(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "model": shown(options.model),
        "draft": shown(options.draft),
        "configs": dict(options.config),
        "bursty": options.bursty and [options.bursty, options.bursty_seconds],
        "prompts": checksum(options.prompts) if options.prompts else "standard library",
        **{name: getattr(options, name) for name in RECORDED},
    }
