"""Command-line arguments that commands share, and types whose errors name the expected value."""

import argparse
import math
from pathlib import Path

from vllm_adaptive_tree.bench.environment import DRAFT, TARGET, check_installed
from vllm_adaptive_tree.bench.prompts import parse


def add_pair(parser: argparse.ArgumentParser) -> None:
    for name, bundled in (("model", TARGET), ("draft", DRAFT)):
        which = f"a folder or hub name (default: the bundled {Path(bundled).name})"
        parser.add_argument(f"--{name}", type=model, default=bundled, help=which)
    parser.add_argument("--dtype", default="auto", help="as vLLM's (default: the target's own)")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def check_lengths(options: argparse.Namespace) -> None:
    if options.max_tokens >= options.max_model_len:
        raise ValueError(f"--max-tokens {options.max_tokens} leaves no room for a prompt in --max-model-len")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def prompts_file(text: str) -> tuple[str, ...]:
    try:
        found = parse(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not found:
        raise argparse.ArgumentTypeError(f"{text} holds no prompt")
    return found


def new_file(text: str) -> Path:
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist")
    return Path(text)


def parameters(text: str) -> int:
    """Number of parameters: "0.5B", "70M" or a plain number."""
    scale = {"B": 10**9, "M": 10**6}.get(text[-1:].upper(), 1)
    try:
        count = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        count = 0
    if not 1 <= count < 10**13:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; write 0.5B, 70M or a plain number")
    return int(count)


def model(text: str) -> str:
    """A folder or a hub name; what can only be a folder must be one."""
    try:
        check_installed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not text or (not Path(text).is_dir() and (text[0] in "/.~" or text.count("/") > 1)):
        raise argparse.ArgumentTypeError(f"{text!r} is no folder here, and no hub name, which is OWNER/NAME")
    return text
