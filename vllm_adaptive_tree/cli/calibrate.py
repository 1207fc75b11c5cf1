"""Measure the parameters of a method for a pair of models: Sequoia's vector of acceptance rates."""

import argparse
import json
import sys
from collections.abc import Mapping

from vllm_adaptive_tree.cli import collecting
from vllm_adaptive_tree.cli.arguments import positive
from vllm_adaptive_tree.cli.collecting import collect, job_of, resumable
from vllm_adaptive_tree.files import atomic_write

CHILDREN: Mapping[str, str | None] = {"rrsw": "without_replacement", "rrs": "iid", "spechub": None}
"""Rule -> the kind of children that it tests; None: the only one that it takes."""
MOST, PAIR = 16, 2
EXAMPLES = ("sequoia --model TARGET --draft DRAFT --out sequoia.json",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    sequoia = what.add_parser("sequoia", help="acceptance rates of the first, second, .. child (arXiv 2402.12374)")
    collecting.add_arguments(sequoia, what="the vector (JSON)")
    sequoia.add_argument(
        "--children",
        type=positive,
        help=f"of a node, at most (default: {MOST}; {PAIR} for spechub, which takes no more)",
    )
    sequoia.add_argument(
        "--rule",
        choices=tuple(CHILDREN),
        default="rrsw",
        help="that the trees will be verified with, as `rejection_sample_method` (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    return resumable(options, lambda: _sequoia(options))


def _sequoia(options: argparse.Namespace) -> None:
    hub = options.rule == "spechub"
    children = options.children or (PAIR if hub else MOST)
    if hub and children > PAIR:
        raise ValueError(f"--rule spechub tests {PAIR} children of a node; give --children {PAIR}, or leave it out")
    kind = CHILDREN[options.rule]
    tree = {"shape": [children]} | ({} if kind is None else {"children": kind})
    job = job_of(options, "sequoia", {}, "static_tree", children, tree, rule=options.rule)
    rank = collect(job).columns["rank"]
    vector = [float((rank == child).float().mean()) for child in range(children)]
    for child, rate in enumerate(vector, 1):
        print(f"child {child:2}: {rate:.4f} ± {(rate * (1 - rate) / len(rank)) ** 0.5:.4f}")
    print(f"one of them: {sum(vector):.4f}, of {len(rank):,} positions")
    measured = {"vector": [round(rate, 5) for rate in vector], "positions": len(rank), **job.arguments()}
    atomic_write(options.out, (json.dumps(measured, indent=2) + "\n").encode())
    print(f"\n{options.out} is written; the examples stay in {job.parts}", file=sys.stderr)
