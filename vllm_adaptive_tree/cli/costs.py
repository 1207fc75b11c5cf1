"""Write a cost file, for `bench --project` and `cost_profile`: measured here, or estimated from a data sheet."""

import argparse
import json
import os

from vllm_adaptive_tree.bench.environment import set_environment
from vllm_adaptive_tree.cli.arguments import new_file, parameters, positive
from vllm_adaptive_tree.files import atomic_write

MAX_ROWS = 576


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True)
    here = kinds.add_parser("measure", help="on this machine")
    here.add_argument("--model", required=True)
    here.add_argument("--draft", required=True)
    here.add_argument("--dtype", default="auto")
    sheet = kinds.add_parser("roofline", help="from a data sheet")
    sheet.add_argument("--target", type=parameters, required=True, help="parameters")
    sheet.add_argument("--draft", type=parameters, required=True, help="parameters")
    sheet.add_argument("--width", type=float, default=2.0, help="bytes of a parameter (default: 2)")
    sheet.add_argument("--bandwidth", type=float, required=True, help="bytes per second")
    sheet.add_argument("--operations", type=float, required=True, help="per second")
    sheet.add_argument("--step", type=float, default=0.0, help="seconds of a step outside the models (default: 0)")
    for one in (here, sheet):
        one.add_argument("--name", required=True, help="machine and models, and whether measured")
        one.add_argument("--rows", type=positive, default=MAX_ROWS, help="highest (default: %(default)s)")
        one.add_argument("--out", type=new_file, required=True)


def run(options: argparse.Namespace) -> int:
    from vllm_adaptive_tree.bench.costs import measured, roofline
    from vllm_adaptive_tree.bench.projection import Hardware
    from vllm_adaptive_tree.budget import Costs

    if options.kind == "measure":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model runner is accessed in this process
        set_environment(options.model, options.draft)
        found = measured(options.name, options.model, options.draft, options.dtype, options.rows)
    else:
        machine = {"width": options.width, "bandwidth": options.bandwidth, "operations": options.operations}
        verify, draft = (roofline(count, options.rows, **machine) for count in (options.target, options.draft))
        found = Hardware(options.name, Costs(verify, draft), options.step)
    atomic_write(options.out, (json.dumps(found.to_json()) + "\n").encode())
    return 0
