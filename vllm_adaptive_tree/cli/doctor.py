"""Report the installed versions and if this release serves them, run a short test on the bundled pair, list what slows
this machine down, and the acceptance of drafts in past engines; with --gpu, run the start-up check of a GPU in its
long form.

It ends with 1 if the short test fails. --gpu runs engines on the bundled pair and writes a report for an issue. It ends
with 0 if all passed, 1 if something failed, and 2 without a CUDA device: then only the kernels run, in Triton's
interpreter.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.environment import DRAFT, HEAD, TARGET
from vllm_adaptive_tree.cli.machine import slowness
from vllm_adaptive_tree.cli.self_test import described, self_test
from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.proposers import METHODS, RECOMMENDED
from vllm_adaptive_tree.version import __version__
from vllm_adaptive_tree.versions import is_supported, window

NO_DEVICE = 2
ENGINES: tuple[dict[str, Any], ...] = (
    {"method": RECOMMENDED, "num_speculative_tokens": 64},
    {"method": "dyspec", "num_speculative_tokens": 63, "rejection_sample_method": "rrsw"},
    {"method": "static_tree", "num_speculative_tokens": 14, "tree": {"shape": "binary"}},
)
OF_HEAD = {"method": RECOMMENDED, "num_speculative_tokens": 63}
SHARE = 0.3
"""Share of the device's memory for each engine."""
EXAMPLES = (
    "",
    "--json --no-self-test",
    "--gpu --out report.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="run the checks of a GPU, a few minutes")
    parser.add_argument("--no-self-test", action="store_true", help="start no engine: about twenty seconds less")
    parser.add_argument("--json", action="store_true", help="print JSON")
    report = Path("adaptive-tree-report.json")
    parser.add_argument("--out", type=Path, default=report, metavar="FILE", help="the report of --gpu")


def run(options: argparse.Namespace) -> int:
    if options.gpu and not _devices():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    report, code = installed(), 0
    if report["vLLM is supported"]:
        from vllm_adaptive_tree.engine.metrics.acceptance_record import records

        report["acceptance"] = records()
    if not _devices():
        report["slow"] = slowness()
        if report["vLLM is supported"] and not options.gpu and not options.no_self_test:
            print("self-test: an engine with trees and one without, about twenty seconds ...", file=sys.stderr)
            report["self-test"] = self_test()
            code = 0 if report["self-test"]["passed"] else 1
    if options.gpu:
        report["checks"], code = _gpu()
        report["code"] = code
    report["ok"] = report["vLLM is supported"] and code == 0
    if options.gpu:
        atomic_write(options.out, (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps(report, indent=1) if options.json else _text(report))
    if options.gpu and not options.json:
        print(f"The whole report is in {options.out}; attach it to an issue.")
    return code


def installed() -> dict[str, Any]:
    """Report of versions, the platform, the supported releases, and the methods with their rules."""
    versions = {name: _version(name) for name in ("vllm", "torch", "triton")}
    found: dict[str, Any] = {
        "versions": {"vllm-adaptive-tree": __version__, "python": platform.python_version(), **versions},
        "machine": platform.platform(),
        "devices": _devices(),
        "supported vLLM": window(),
        "methods": sorted(METHODS),
        "pairs": {method: _rules(method) for method in sorted(METHODS)},
    }
    vllm = versions["vllm"]
    found["vLLM is supported"] = vllm is not None and is_supported(vllm)
    found["patches"] = _patches() if found["vLLM is supported"] else []
    return found


def _version(name: str) -> str | None:
    try:
        return str(importlib.import_module(name).__version__)
    except ImportError:
        return None


def _devices() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _rules(method: str) -> list[str]:
    """Rules that are lossless with the method; the first is that of "auto"."""
    from vllm_adaptive_tree.acceptance import RULES
    from vllm_adaptive_tree.config import TreeOptions
    from vllm_adaptive_tree.methods import Pair, resolve

    def pair(rule: str) -> Pair:
        config = {"method": method, "model": DRAFT, "num_speculative_tokens": 8, "rejection_sample_method": rule}
        return resolve(TreeOptions.parse(config)[0])

    found = [pair("auto").rule_name]
    for rule in RULES:
        with contextlib.suppress(ValueError):  # refused with the legal ones
            found += [pair(rule).rule_name] if rule not in found else []
    return found


def _patches() -> list[dict[str, Any]]:
    """Patches of vLLM, their reasons, and True for those installed now: only the entry point's, until an engine is
    asked for."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from vllm_adaptive_tree.engine.patches import PATCHES

    load_general_plugins()
    module = EngineArgs.create_engine_config.__globals__["__name__"]
    now = {"EngineArgs.create_engine_config": module.startswith("vllm_adaptive_tree")}
    return [{"what": what, "why": why, "now": now.get(what, False)} for what, why in PATCHES.items()]


def _text(report: dict[str, Any]) -> str:
    lines = [f"{name} {version or 'is not installed'}" for name, version in report["versions"].items()]
    supported = "which is supported" if report["vLLM is supported"] else "and not the one here"
    lines += [
        f"machine: {report['machine']}; CUDA devices: {', '.join(report['devices']) or 'none'}",
        f"this release supports vLLM {report['supported vLLM']}, {supported}",
        "replaced in vLLM:" if report["patches"] else "replaced in vLLM: nothing",
        *(f"  {one['what']}{'' if one['now'] else ' (for a tree method)'}: {one['why']}" for one in report["patches"]),
        'methods, and their lossless rules (the first is what "auto" takes):',
        *(f"  {method}: {', '.join(rules)}" for method, rules in report["pairs"].items()),
    ]
    lines += [f"slow here: {one}" for one in report.get("slow", ())]
    lines += accepted(report.get("acceptance"))
    for engine, findings in report.get("checks", {}).items():
        lines += [f"{engine}:", *(f"  {line}" for line in _lines(findings))]
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: dict[str, Any]) -> str:
    said = []
    if not report["vLLM is supported"]:
        said.append(f"install vLLM {report['supported vLLM']}")
    if (test := report.get("self-test")) is not None:
        said.append(f"self-test on the bundled pair: {described(test)}")
    if report.get("code"):
        said.append("nothing has run on a GPU" if report["code"] == NO_DEVICE else "a check above has failed")
    return ": ".join(["OK" if report["ok"] else "NOT OK", *(["; ".join(said)] if said else [])])


def accepted(records: list[dict[str, Any]] | None) -> list[str]:
    """Lines about the records in vLLM's cache folder; None: not read, without a vLLM that is supported."""
    if records is None:
        return []
    lines = [] if records else ["acceptance of drafts: not known, no engine has left a record in vLLM's cache folder"]
    for one in records:
        share = f"{100 * one['accepted'] / one['steps']:.1f} % of {one['steps']} drafted steps"
        verdict = "TOO LOW, likely causes:" if one["low"] else "no alarm"
        lines.append(
            f"acceptance of draft {one['draft']} for {one['target']} ({one['method']}, engine {one['engine']}, "
            f"{one['time']}): a node at depth 1 in {share}, {verdict}"
        )
        lines += [f"  {cause}" for cause in one["causes"]]
    return lines


def _lines(findings: list[dict[str, Any]]) -> list[str]:
    from vllm_adaptive_tree.engine.self_check.verdict import Finding

    return [str(Finding(**finding)) for finding in findings]


def _gpu() -> tuple[dict[str, list[dict[str, Any]]], int]:
    if not _devices():
        print("There is no CUDA device here: only the kernels are checked, in Triton's interpreter.", file=sys.stderr)
        return {"kernels, interpreted": _interpreted()}, NO_DEVICE
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model runner is accessed in this process
    found = {}
    for engine in ENGINES:
        name = f"{engine['method']}, {engine['num_speculative_tokens']} nodes"
        found[name] = engine_checks(TARGET, {"model": DRAFT, **engine})
    found[f"{RECOMMENDED}, EAGLE-3 head"] = engine_checks(TARGET, {"model": HEAD, **OF_HEAD})
    passed = all(finding["passed"] for findings in found.values() for finding in findings)
    return found, 0 if passed else 1


def engine_checks(target: str, speculation: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    """Run the long form: every part of the check in an engine of its own, with its costs."""
    from vllm import LLM

    from vllm_adaptive_tree.engine.self_check import check, worth

    os.environ[check.SWITCH] = "off"  # off at the start; it runs below
    speculation = {**speculation, "tree": {"cost_profile": None, **speculation.get("tree", {})}}
    defaults = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 32, "gpu_memory_utilization": SHARE}
    llm: Any = LLM(target, speculative_config=speculation, **{**defaults, **arguments})
    core = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    try:
        findings = check.check(runner).findings
        if runner.options.tree.budget == "auto":
            costs = runner.budget.budget.costs
            nodes = runner.options.num_speculative_tokens
            findings = [*findings, worth.figures(costs, nodes=nodes, levels=runner.speculator.levels)]
    finally:
        core.shutdown()
        del os.environ[check.SWITCH]
    return [finding._asdict() for finding in findings]


def _interpreted() -> list[dict[str, Any]]:
    """Check the kernels on a CPU, in shapes of a small model."""
    from types import SimpleNamespace

    import torch

    from vllm_adaptive_tree.engine.self_check import attention, draws

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = torch.zeros(1, 2, 16, 128, dtype=dtype)
        impl = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=64)
        layer = SimpleNamespace(kv_cache=cache, head_size=64, impl=impl)
        found.append(attention.check(layer, block_size=16, nodes=12, longest=256, scale=0.125))
    found.append(draws.check(vocabulary=1000, device=torch.device("cpu")))
    return [finding._asdict() for finding in found]
