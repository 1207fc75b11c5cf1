"""Write a cost file, for `bench --project` and `cost_profile`: measured here, or estimated from a data sheet."""

import argparse
import json
import os

from vllm_adaptive_tree.bench.environment import check_available, set_environment
from vllm_adaptive_tree.cli.arguments import model, new_file, parameters, positive_number
from vllm_adaptive_tree.files import atomic_write

MAX_ROWS = 576
"""Most rows of a forward."""
EXAMPLES = (
    'measure --model TARGET --draft DRAFT --name "my machine, measured" --out mine.json',
    "roofline --target 8B --draft 0.25B --bandwidth 3.35e12 --operations 989e12 --name H100 --out h100.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True)
    here = kinds.add_parser("measure", help="on this machine")
    here.add_argument("--model", type=model, required=True, help="the target")
    here.add_argument("--draft", type=model, required=True, help="an independent model")
    here.add_argument("--dtype", default="auto", help="as vLLM's")
    sheet = kinds.add_parser("roofline", help="from a data sheet")
    sheet.add_argument("--target", type=parameters, required=True, help="parameters")
    sheet.add_argument("--draft", type=parameters, required=True, help="parameters")
    sheet.add_argument("--width", type=positive_number, default=2.0, help="bytes of a parameter (default: 2)")
    sheet.add_argument("--bandwidth", type=positive_number, required=True, help="bytes per second")
    sheet.add_argument("--operations", type=positive_number, required=True, help="per second")
    sheet.add_argument("--step", type=_seconds, default=0.0, help="seconds of a step outside the models (default: 0)")
    for one in (here, sheet):
        one.add_argument("--name", required=True, help="machine and models, and whether measured")
        one.add_argument("--out", type=new_file, required=True, metavar="FILE", help="the cost file")


def run(options: argparse.Namespace) -> int:
    from vllm_adaptive_tree.bench.costs import measured, roofline
    from vllm_adaptive_tree.bench.projection import Hardware
    from vllm_adaptive_tree.budget import Costs

    if options.kind == "measure":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model runner is accessed in this process
        set_environment(options.model, options.draft)
        check_available(options.model, options.draft)
        found = measured(options.name, options.model, options.draft, options.dtype, MAX_ROWS)
    else:
        machine = {"width": options.width, "bandwidth": options.bandwidth, "operations": options.operations}
        verify, draft = (roofline(count, MAX_ROWS, **machine) for count in (options.target, options.draft))
        found = Hardware(options.name, Costs(verify, draft), options.step)
    atomic_write(options.out, (json.dumps(found.to_json()) + "\n").encode())
    return 0


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else positive_number(text)
