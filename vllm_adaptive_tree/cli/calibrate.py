"""Measure what a method needs to know about a pair of models: Sequoia's vector of acceptance rates."""

import argparse
import json
import sys

from vllm_adaptive_tree.cli import collecting
from vllm_adaptive_tree.cli.arguments import positive
from vllm_adaptive_tree.cli.collecting import collect, job_of, resumable
from vllm_adaptive_tree.files import atomic_write

RULE = "rrsw"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    sequoia = what.add_parser("sequoia", help="acceptance rates of the first, second, .. child (arXiv 2402.12374)")
    collecting.add_arguments(sequoia, what="the vector (JSON)")
    sequoia.add_argument("--children", type=positive, default=16, help="of a node, at most (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    return resumable(options, lambda: _sequoia(options))


def _sequoia(options: argparse.Namespace) -> None:
    tree = {"shape": [options.children], "children": "without_replacement"}
    job = job_of(options, "sequoia", {}, "static_tree", options.children, tree, rule=RULE)
    rank = collect(job).columns["rank"]
    vector = [float((rank == child).float().mean()) for child in range(options.children)]
    for child, rate in enumerate(vector, 1):
        print(f"child {child:2}: {rate:.4f} ± {(rate * (1 - rate) / len(rank)) ** 0.5:.4f}")
    print(f"one of them: {sum(vector):.4f}, of {len(rank):,} positions")
    measured = {"vector": [round(rate, 5) for rate in vector], "positions": len(rank), **job.arguments()}
    atomic_write(options.out, (json.dumps(measured, indent=2) + "\n").encode())
    print(f"\n{options.out} is written; the examples stay in {job.parts}", file=sys.stderr)
