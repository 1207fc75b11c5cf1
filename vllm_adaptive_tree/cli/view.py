"""Write one HTML file of the trees that an engine has recorded: each step's tree with probabilities, and its verified,
accepted and cut nodes.

An engine records with ADAPTIVE_TREE_RECORD=steps.jsonl in its environment, up to 64 MiB. The file, and the page,
hold the text that the requests were given.
"""

import argparse
from pathlib import Path

from vllm_adaptive_tree.cli.arguments import positive
from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.report import viewer

EXAMPLES = ("steps.jsonl --out steps.html",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what the engine has recorded")
    parser.add_argument("--out", type=Path, metavar="HTML", help="the page (default: FILE with .html)")
    parser.add_argument("--last", type=positive, default=5000, metavar="N", help="trees to show (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write the page."""
    out = options.out or options.file.with_suffix(".html")
    record = viewer.read(options.file, options.last)
    atomic_write(out, viewer.page(record).encode())
    print(f"{out}: {len(record['steps'])} trees; open it in a browser, arrow keys go through the steps")
    return 0
