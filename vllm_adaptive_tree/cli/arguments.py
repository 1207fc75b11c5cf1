"""Types of command-line arguments; their errors say what is expected."""

import argparse
from pathlib import Path

from vllm_adaptive_tree.bench.prompts import parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


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
    """ "0.5B", "70M" or a plain number of parameters."""
    scale = {"B": 10**9, "M": 10**6}.get(text[-1:].upper(), 1)
    try:
        count = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        count = 0
    if not 1 <= count < 10**13:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; write 0.5B, 70M or a plain number")
    return int(count)
