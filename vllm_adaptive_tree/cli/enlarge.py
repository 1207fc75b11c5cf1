"""Enlarge a model without changing its function, by MLP units with a zero down-projection.

For measurements: a step of a small trained model costs next to nothing, unlike that of any model in use.
"""

import argparse
import sys
from pathlib import Path

from vllm_adaptive_tree.bench.models import enlarge
from vllm_adaptive_tree.cli.arguments import parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a Llama-like model with safetensors")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--to", type=parameters, default="0.5B", help="parameters (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    try:
        count = enlarge(options.model, options.out, options.to)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {count:,} parameters")
    return 0
