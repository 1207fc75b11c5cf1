"""Parser of every command: its help has defaults, and examples at the end."""

import argparse
from collections.abc import Sequence
from typing import Any


class Help(argparse.HelpFormatter):
    """Paragraphs are wrapped, those that are indented kept."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if part.startswith("  ") else fill(part, width, indent) for part in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = not action.option_strings or action.default in (None, False, argparse.SUPPRESS)
        if said or action.nargs == 0 or action.help is None or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Also of the commands within a command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"formatter_class": Help, **given})


def epilog(command: str, examples: Sequence[str]) -> str:
    return "\n".join(["examples:\n", *(f"  {command} {example}" for example in examples)])
