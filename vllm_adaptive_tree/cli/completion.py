"""Print what completes the commands and options of vllm-adaptive-tree in a shell."""

import argparse

from vllm_adaptive_tree.cli.main import COMMANDS, parser_of

EXAMPLES = ("bash > ~/.local/share/bash-completion/completions/vllm-adaptive-tree",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(parser_of(tuple(COMMANDS)), options.shell))
    return 0
