"""Measure no speculation, vLLM's chains and tree methods side by side, with confidence intervals."""

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.environment import check_available, set_environment
from vllm_adaptive_tree.bench.statistics import MIN_ROUNDS
from vllm_adaptive_tree.cli.arguments import add_pair, add_quiet, check_lengths, parameters, positive, prompts_file
from vllm_adaptive_tree.proposers import METHODS, RECOMMENDED

EXAMPLES = (
    "--model TARGET --draft DRAFT --out results",
    "--enlarge-to 0.5B --chains 3 --concurrency 1,8 --server '' --out results",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="results; the same command resumes there"
    )
    add_pair(parser)
    parser.add_argument(
        "--enlarge-to",
        type=parameters,
        metavar="SIZE",
        help="enlarge the target to that many parameters, 0.5B say, without changing its function",
    )
    parser.add_argument("--eager", action="store_true", help="run without compilation")
    parser.add_argument(
        "--methods",
        type=_list(_method),
        default=[RECOMMENDED],
        help=f"tree methods, with budget auto (default: {RECOMMENDED})",
    )
    parser.add_argument(
        "--nodes", type=positive, default=16, help="maximum number of nodes of --methods' trees (default: %(default)s)"
    )
    parser.add_argument(
        "--config",
        type=_config,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="another speculative_config and its name; the draft is filled in; repeatable",
    )
    parser.add_argument("--random-draft", action="store_true", help="also the first method, with a random draft")
    parser.add_argument("--self-draft", action="store_true", help="also the first method, the target as its draft")
    numbers = _list(positive)
    parser.add_argument(
        "--chains", type=numbers, default=[1, 3, 5], help="K of vLLM's chains (default: 1,3,5; none: '')"
    )
    parser.add_argument(
        "--concurrency", type=numbers, default=[1, 2, 8, 32], help="requests at a time, at T = 0 (default: 1,2,8,32)"
    )
    parser.add_argument(
        "--sampled",
        type=numbers,
        default=[1, 8],
        help="requests at a time, with the model's own sampling (default: 1,8)",
    )
    parser.add_argument("--server", type=numbers, default=[1, 8], help="clients of the server, at T = 0 (default: 1,8)")
    parser.add_argument(
        "--bursty",
        type=positive,
        nargs="?",
        const=32,
        metavar="MAX",
        help="also a load that alternates between 1 and MAX requests (default of MAX: 32)",
    )
    parser.add_argument(
        "--bursty-seconds",
        type=positive,
        default=10,
        help="length of each phase of the bursty load (default: %(default)s)",
    )
    parser.add_argument(
        "--first-steps",
        type=numbers,
        default=[],
        metavar="REQUESTS",
        help="also the first 64 steps of each tree method, cold and with what an earlier process has learnt, with this "
        "many requests: 1 or 1,8",
    )
    parser.add_argument(
        "--rounds", type=_rounds, default=MIN_ROUNDS, help=f"rounds of every load, at least {MIN_ROUNDS}"
    )
    parser.add_argument(
        "--requests-per-slot",
        type=positive,
        metavar="N",
        help="requests of a round per concurrent request (default: 3, but at most 64 in all)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=48, help="new tokens of a request (default: %(default)s)"
    )
    parser.add_argument("--max-model-len", type=positive, default=1024, help="longest text (default: %(default)s)")
    parser.add_argument(
        "--project",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a cost file of other hardware: project the measured acceptance to it; repeatable",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=75.0,
        help="no round begins later; 0: only report finished rounds (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        metavar="FILE",
        help="one per line, or blocks separated by lines of three dashes (default: Python's standard library)",
    )
    parser.add_argument("--json", action="store_true", help="print results.json in place of the tables")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns 1 if something did not run, 2 for wrong arguments, 130 if interrupted, else 0."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines and servers end with the command
    try:
        check_lengths(options)
        set_environment(options.model, options.draft, enlarged=bool(options.enlarge_to))
        os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
        drafts = [given["model"] for _, given in options.config if isinstance(given.get("model"), str)]
        check_available(options.model, options.draft, *drafts)
        from vllm_adaptive_tree.bench.run import run

        return run(options)
    except KeyboardInterrupt:
        return 130


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part.strip()) for part in text.split(",") if part.strip()]


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} is no tree method; known: {', '.join(METHODS)}")
    return text


def _rounds(text: str) -> int:
    if positive(text) < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"{text} rounds are too few for a ratio; give {MIN_ROUNDS} or more")
    return int(text)


def _config(text: str) -> tuple[str, dict[str, Any]]:
    name, _, given = text.partition("=")
    try:
        data = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=JSON: {error}") from error
    if not name.strip() or not isinstance(data, dict) or not isinstance(data.get("num_speculative_tokens"), int):
        raise argparse.ArgumentTypeError(
            f'{text!r}: write NAME={{"method": "{RECOMMENDED}", "num_speculative_tokens": 16, ...}}'
        )
    return name.strip(), data
