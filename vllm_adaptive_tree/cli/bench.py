"""Measure no speculation, vLLM's chains and tree methods side by side, and say how sure the figures are."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_adaptive_tree.bench.plan import BASE, Cell, Config, Stage
from vllm_adaptive_tree.bench.statistics import ENOUGH
from vllm_adaptive_tree.cli.arguments import parameters, positive, prompts_file
from vllm_adaptive_tree.cli.demo import PAIR, shown
from vllm_adaptive_tree.proposers import METHODS
from vllm_adaptive_tree.version import __version__

if TYPE_CHECKING:
    from vllm_adaptive_tree.bench.offline import Setup

MOST_TOKENS = 512  # of a step: vLLM warms up with so many, tens of seconds on a CPU
MAX_MODEL_LEN = 1024
ENVIRONMENT = {  # set where the user has not
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # each engine has a process of its own already
    "VLLM_LOGGING_LEVEL": "ERROR",
}


COLD = {"cost_profile": None}
"""Of tree methods, unless a --config says otherwise: what earlier runs have learnt is no part of this one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pair = "a folder or hub name (default: the bundled %s)"
    parser.add_argument("--out", type=Path, metavar="DIR", help="results; the same command resumes there")
    parser.add_argument(
        "--replay",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="no engine: the budget on recorded trees (the bundled ones unless named), simulated loads and costs",
    )
    parser.add_argument("--model", default=str(PAIR / "target"), help=pair % "target")
    parser.add_argument("--draft", default=str(PAIR / "draft"), help=pair % "draft")
    parser.add_argument(
        "--enlarge-to", type=parameters, metavar="SIZE", help="a target of that size and the same function, 0.5B say"
    )
    parser.add_argument("--dtype", default="auto", help="as vLLM's (default: the model's own)")
    parser.add_argument("--eager", action="store_true", help="run without compilation")
    parser.add_argument(
        "--methods",
        type=_list(_method),
        default=["opt_tree"],
        help="tree methods, with budget auto (default: opt_tree)",
    )
    parser.add_argument(
        "--nodes", type=positive, default=16, help="of --methods' trees, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--config",
        type=_config,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="one more speculative_config under a name of its own; the draft is filled in; repeatable",
    )
    parser.add_argument("--random-draft", action="store_true", help="opt_tree with a draft of random weights as well")
    parser.add_argument("--self-draft", action="store_true", help="opt_tree with the target as its draft as well")
    numbers = _list(positive)
    parser.add_argument(
        "--chains", type=numbers, default=[1, 3, 5], help="K of vLLM's chains (default: 1,3,5; none: '')"
    )
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 8, 32], help="at T = 0 (default: 1,2,8,32)")
    parser.add_argument("--sampled", type=numbers, default=[1, 8], help="with the model's own sampling (default: 1,8)")
    parser.add_argument("--server", type=numbers, default=[1, 8], help="through the server at T = 0 (default: 1,8)")
    parser.add_argument(
        "--swing",
        type=positive,
        nargs="?",
        const=32,
        metavar="MOST",
        help="a load that swings between 1 and MOST requests as well (32 unless given)",
    )
    parser.add_argument(
        "--swing-seconds", type=positive, default=10, help="of each phase of the swing (default: %(default)s)"
    )
    parser.add_argument(
        "--first-steps",
        type=numbers,
        default=[],
        metavar="REQUESTS",
        help="the first 64 steps of each tree method, cold and with what an earlier process has learnt, for so many "
        "requests: 1 or 1,8",
    )
    parser.add_argument("--rounds", type=_rounds, default=ENOUGH, help=f"of every cell, {ENOUGH} at least")
    parser.add_argument(
        "--waves",
        type=positive,
        metavar="N",
        help="requests of a round for each that runs at a time (default: 3; 64 in all are enough)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=48, help="new tokens of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--max-model-len", type=positive, default=MAX_MODEL_LEN, help="longest text (default: %(default)s)"
    )
    parser.add_argument(
        "--project",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="costs of other hardware: what the measured acceptance would come to there; repeatable",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=75.0,
        help="no round begins later; 0: only show what there is (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        metavar="FILE",
        help="one per line, or blocks separated by lines of three dashes (default: cuts of Python's standard library)",
    )


def run(options: argparse.Namespace) -> int:
    """Returns 1 where something did not run, 2 for arguments that do not fit, 130 where it was interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines and servers end with the command
    try:
        return _run(options) if options.replay is None else _replay(options.replay)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _replay(files: list[Path]) -> int:
    from vllm_adaptive_tree.bench import replay
    from vllm_adaptive_tree.bench.recording import Recording, bundled

    rows = replay.rows([Recording.load(file) for file in files or bundled()])
    print(replay.table(replay.compare(replay.POLICIES, rows)))
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.out is None:
        raise ValueError("--out is missing: a folder for the results")
    if options.max_tokens >= options.max_model_len:
        raise ValueError(f"--max-tokens {options.max_tokens} leaves no room for a prompt in --max-model-len")
    set_environment(options)
    from vllm_adaptive_tree.bench.first import measure_first
    from vllm_adaptive_tree.bench.models import enlarged
    from vllm_adaptive_tree.bench.plan import stages
    from vllm_adaptive_tree.bench.process import EngineProcess
    from vllm_adaptive_tree.bench.progress import Progress
    from vllm_adaptive_tree.bench.projection import read_costs
    from vllm_adaptive_tree.bench.report import report
    from vllm_adaptive_tree.bench.rounds import Store
    from vllm_adaptive_tree.bench.schedule import Engine, Schedule
    from vllm_adaptive_tree.bench.server import Server

    found, costs = cells(options), [read_costs(file) for file in options.project]
    check_names(options)
    settings = settings_of(options)
    store = Store.open(options.out, settings)
    target, size = options.model, None
    if options.enlarge_to:
        target, size = enlarged(options.model, options.out / "models", options.enlarge_to)
    compared = configs(options, target)
    setup = setup_of(options, target, [*found, *first_cells(options)], compared)
    logs = options.out / "logs"
    logs.mkdir(exist_ok=True)

    def start(stage: Stage, config: Config) -> Engine:
        log = logs / f"{'server' if stage.served else 'offline'} {config.name}.log".replace(" ", "-").replace("/", "-")
        return Server(config, setup, log) if stage.served else EngineProcess(config, setup, log)

    def begin(config: Config) -> Engine:
        return start(Stage(False, (config,), ()), config)

    interrupted, deadline = False, time.monotonic() + 60 * options.minutes
    with Progress() as progress:
        schedule = Schedule(stages(compared, found), store, options.rounds, 60 * options.minutes, start, progress)
        try:
            schedule.run()
        except KeyboardInterrupt:
            interrupted = True
        for cell in first_cells(options) if not interrupted else []:
            for config in compared:
                if config.role == "method":
                    measure_first(cell, config, store, options.rounds, begin, lambda: time.monotonic() < deadline)
    about = {**settings, "enlarged": size and {"parameters": size}}
    report(options.out, about, found, compared, store.rounds, costs, schedule.failures, first_cells(options))
    if left := schedule.turns():
        print(f"{left} rounds of an engine are left; the same command goes on there.", file=sys.stderr)
    for stage, reason in schedule.failures.items():
        print(f"did not run: {stage}: {reason}", file=sys.stderr)
    return 130 if interrupted else 1 if schedule.failures else 0


def set_environment(options: argparse.Namespace) -> None:
    tiny = options.model == str(PAIR / "target") and not options.enlarge_to  # threads slow it down
    os.environ.setdefault("OMP_NUM_THREADS", "1" if tiny else str(os.cpu_count()))
    local = Path(options.model).is_dir() and Path(options.draft).is_dir()
    for name, value in ENVIRONMENT.items():
        if local or name != "HF_HUB_OFFLINE":
            os.environ.setdefault(name, value)


def setup_of(options: argparse.Namespace, target: str, cells: list[Cell], compared: list[Config]) -> "Setup":
    from vllm_adaptive_tree.bench.loads import standard
    from vllm_adaptive_tree.bench.offline import Setup

    most = max(cell.concurrency for cell in cells)
    nodes = max((one.speculation["num_speculative_tokens"] for one in compared if one.speculation), default=0)
    return Setup(
        model=target,
        dtype=options.dtype,
        eager=options.eager,
        max_model_len=options.max_model_len,
        max_num_seqs=most,
        max_num_batched_tokens=max(MOST_TOKENS, most * (nodes + 2)),  # every tree in its full size
        max_tokens=options.max_tokens,
        swing_seconds=options.swing_seconds,
        prompts=options.prompts or standard(),
        waves=options.waves,
    )


def cells(options: argparse.Namespace) -> list[Cell]:
    """Raises ValueError where nothing is asked for."""
    found = [Cell("offline", count) for count in options.concurrency]
    found += [Cell("offline", count, sampled=True) for count in options.sampled]
    found += [Cell("swing", options.swing)] if options.swing else []
    found += [Cell("server", count) for count in options.server]
    if not found and not options.first_steps:
        raise ValueError("nothing to measure: give --concurrency, --sampled, --server, --swing or --first-steps")
    return found


def first_cells(options: argparse.Namespace) -> list[Cell]:
    return [Cell("first", count) for count in options.first_steps]


def configs(options: argparse.Namespace, target: str) -> list[Config]:
    def tree(method: str, draft: str) -> dict[str, Any]:
        tokens = options.nodes
        return {"method": method, "model": draft, "num_speculative_tokens": tokens, "tree": {"budget": "auto", **COLD}}

    found = [Config(BASE, "base", None)]
    for count in options.chains:
        chain = {"method": "draft_model", "model": options.draft, "num_speculative_tokens": count}
        found.append(Config(f"chain {count}", "chain", chain))
    found += [Config(method, "method", tree(method, options.draft)) for method in options.methods]
    for name, given in options.config:
        found.append(
            Config(name, "method", {"model": options.draft, **given, "tree": {**COLD, **given.get("tree", {})}})
        )
    if options.random_draft:
        from vllm_adaptive_tree.bench.models import random_draft

        found.append(
            Config("random draft", "probe", tree("opt_tree", random_draft(options.draft, options.out / "models")))
        )
    if options.self_draft:
        found.append(Config("self draft", "probe", tree("opt_tree", target)))
    return found


def check_names(options: argparse.Namespace) -> None:
    """Raises ValueError where two configurations have one name."""
    names = [BASE, "random draft", "self draft", *(f"chain {count}" for count in options.chains)]
    names += [*options.methods, *(name for name, _ in options.config)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two configurations have the name {twice[0]!r}; rename one")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the rounds depend on; more rounds and more minutes go on with the same ones."""
    import platform

    import vllm

    from vllm_adaptive_tree.gates.parts import checksum

    return {
        "version": __version__,
        "vllm": vllm.__version__,
        "processor": platform.machine(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "model": shown(options.model),
        "draft": shown(options.draft),
        "enlarge_to": options.enlarge_to,
        "dtype": options.dtype,
        "eager": options.eager,
        "nodes": options.nodes,
        "methods": options.methods,
        "configs": dict(options.config),
        "chains": options.chains,
        "random_draft": options.random_draft,
        "self_draft": options.self_draft,
        "concurrency": options.concurrency,
        "sampled": options.sampled,
        "server": options.server,
        "first_steps": options.first_steps,
        "swing": options.swing and [options.swing, options.swing_seconds],
        "waves": options.waves,
        "max_tokens": options.max_tokens,
        "max_model_len": options.max_model_len,
        "prompts": checksum(options.prompts) if options.prompts else "standard library",
    }


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part.strip()) for part in text.split(",") if part.strip()]


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} is no tree method; known: {', '.join(METHODS)}")
    return text


def _rounds(text: str) -> int:
    if positive(text) < ENOUGH:
        raise argparse.ArgumentTypeError(f"{text} rounds are too few for a ratio; give {ENOUGH} or more")
    return int(text)


def _config(text: str) -> tuple[str, dict[str, Any]]:
    name, _, given = text.partition("=")
    try:
        data = json.loads(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=JSON: {error}") from error
    if not name.strip() or not isinstance(data, dict) or not isinstance(data.get("num_speculative_tokens"), int):
        raise argparse.ArgumentTypeError(
            f'{text!r}: write NAME={{"method": "opt_tree", "num_speculative_tokens": 16, ...}}'
        )
    return name.strip(), data
