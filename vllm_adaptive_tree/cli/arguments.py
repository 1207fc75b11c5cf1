"""Types of command-line arguments, which explain themselves when they refuse a value."""

import argparse
from pathlib import Path

from vllm_adaptive_tree.cli.prompts import parse


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
