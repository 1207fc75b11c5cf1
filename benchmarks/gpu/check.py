"""Everything that a GPU can say about this project, in 25 minutes: `make gpu-check`.

    python -m benchmarks.gpu.check [--wheels DIR] [--rehearse]

Each part is a command of its own with a limit of time, so one that fails or hangs leaves the others their figures.
They go to benchmarks/results/VERSION-DEVICE.json, and as tables beside it. Where vLLM is not installed, those parts run
that need PyTorch and Triton alone. --rehearse: on a CPU, tiny.

Without network: elsewhere, on the same platform, `pip download -d DIR -r requirements/gpu.txt`, then `make wheels`, and
copy dist/ to DIR. --wheels DIR installs from there alone.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.bench.environment import DRAFT, HEAD
from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.version import __version__

RESULTS = Path("benchmarks/results")
REQUIREMENTS = "requirements/gpu.txt"


class Part(NamedTuple):
    name: str
    command: list[str]
    minutes: float
    needs: tuple[str, ...] = ("torch", "triton")
    result: str | None = None
    """The file of its figures, in the folder of the run; `{out}` in `command` is that folder."""
    rehearsed: list[str] | None = None
    """In the place of `command` in a rehearsal; None: it is left out."""
    fine: tuple[int, ...] = (0,)
    """Exit codes that are no failure in a rehearsal."""


MODULE = [sys.executable, "-m"]
DOCTOR = [*MODULE, "vllm_adaptive_tree", "doctor", "--gpu", "--out", "{out}/doctor.json"]
ENGINE = [*MODULE, "benchmarks.gpu.engine", "--out", "{out}/engine.json"]
ATTENTION = [*MODULE, "benchmarks.gpu.attention", "--out", "{out}/attention.json"]
OPERATIONS = [*MODULE, "benchmarks.gpu.tree_operations", "--out", "{out}/tree_operations.json"]
VLLM = ("torch", "triton", "vllm")


def bench(name: str, draft: str) -> Part:
    """Tokens per second beside no speculation and vLLM's chain of the same draft, at 1 to 64 requests."""
    command = [*MODULE, "vllm_adaptive_tree", "bench", "--draft", draft, "--enlarge-to", "1B", "--dtype", "bfloat16"]
    command += ["--concurrency", "1,8,64", "--sampled", "", "--server", "", "--chains", "3", "--minutes", "2"]
    return Part(
        name, [*command, "--out", f"{{out}}/{name}"], 4.5, (*VLLM, "rich", "tqdm", "psutil"), f"{name}/results.json"
    )


PARTS = (
    Part("self check", DOCTOR, 6, VLLM, "doctor.json", DOCTOR, (0, 2)),
    Part("engine", ENGINE, 4, VLLM, "engine.json", [*ENGINE, "--rehearse", "--methods", "opt_tree"]),
    bench("head", HEAD),
    bench("model", DRAFT),
    Part("kernels", [*MODULE, "pytest", "-q", "tests/pure/test_kernels.py", "tests/pure/test_tree_attention.py"], 2,
         ("torch", "triton", "pytest")),
    Part("attention", ATTENTION, 2.5, result="attention.json"),
    Part("operations", OPERATIONS, 1.5, result="tree_operations.json"),
)  # fmt: skip
"""In the order of risk: does it start, is it right, what is it worth; then what explains it."""


def run(part: Part, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    """Its figures, or why there are none."""
    command = part.rehearsed if rehearse else part.command
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if command is None or missing:
        return {"left out": f"needs {', '.join(missing)}" if missing else "it needs a device"}
    began, log = time.monotonic(), folder / f"{part.name}.log"
    words = [word.format(out=folder) for word in command]
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(60 * part.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its engines
            code = process.wait()
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began), "code": code}
    found["passed"] = code in (part.fine if rehearse else (0,))
    if part.result is not None and (folder / part.result).exists():
        found["result"] = json.loads((folder / part.result).read_text())
    if not found["passed"]:
        found["log"] = log.read_text()[-4000:]
    return found


def verdicts(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """Questions and answers of the first page; - where a part has no result."""
    started = parts.get("self check", {}).get("passed")
    found = [("starts, and passes its check", "-" if started is None else "yes" if started else "no")]
    methods = [row for row in parts.get("engine", {}).get("result", {}).get("rows", []) if "good" in row]
    good = sum(row["good"] for row in methods)
    found.append(("says what vLLM says, without a wait", f"{good} of {len(methods)} methods" if methods else "-"))
    for name in ("head", "model"):
        for row in parts.get(name, {}).get("result", {}).get("rows", []):
            if row.get("to_best_chain") is not None:
                ratios = " and ".join(ratio(row[key]) for key in ("to_base", "to_best_chain"))
                found.append((f"{name}, {row['cell']}: {row['config']} of none, and of {row['best_chain']}", ratios))
    return found


def ratio(estimate: dict[str, float]) -> str:
    return "{median:.2f} [{low:.2f}, {high:.2f}]".format_map(estimate)


def markdown(results: dict[str, Any]) -> str:
    """The results as tables, the verdicts first."""
    lines = [f"{results['device']}, vllm-adaptive-tree {results['version']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {question} | {answer} |" for question, answer in verdicts(results["parts"])]
    lines += [
        "",
        "| part | passed | seconds |",
        "| --- | --- | --- |",
    ]
    for name, part in results["parts"].items():
        said = part.get("left out") or ("yes" if part["passed"] else f"no ({part['code']})")
        lines.append(f"| {name} | {said} | {part.get('seconds', '')} |")
    engine = results["parts"].get("engine", {}).get("result")
    if engine:
        lines += ["", "| method | requests that part from vLLM | largest margin | host ms | kernels | graphs |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for row in engine["rows"]:
            launches = row["launches"]
            cells = (row["method"], len(row["margins"]), max(row["margins"], default=0.0), row["host_ms"])
            lines.append(f"| {' | '.join(map(str, cells))} | {launches['kernels']} | {launches['graphs']} |")
    for name in ("model", "head"):
        speeds = results["parts"].get(name, {}).get("result")
        if speeds:
            lines += [
                "",
                f"Tokens per second, the bundled {name} as the draft",
                "",
                "| load | method | tokens/s |",
                "| --- | --- | --- |",
            ]
            for row in speeds["rows"]:
                median = (row["tokens_per_second"] or {}).get("median")
                lines.append(f"| {row['cell']} | {row['config']} | {median and round(median, 1)} |")
    return "\n".join(lines) + "\n"


def install(wheels: Path) -> int:
    """From one folder, without network."""
    command = [*MODULE, "pip", "install", "--no-index", "--find-links", str(wheels), "-r", REQUIREMENTS]
    return subprocess.run([*command, "vllm-adaptive-tree[bench]"], check=False).returncode


def device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install from this folder first, without network")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.wheels is not None and (code := install(options.wheels)):
        return code
    name = device()
    if name is None and not options.rehearse:
        print(
            "make gpu-check needs a CUDA device, and PyTorch sees none here; REHEARSE=1 tries it on a CPU.",
            file=sys.stderr,
        )
        return 2
    results: dict[str, Any] = {"version": __version__, "device": name or "CPU, a rehearsal", "parts": {}}
    stem = f"{__version__}-{re.sub('[^a-z0-9]+', '-', (name or 'rehearsal').lower())}"
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            print(f"{part.name}: at most {part.minutes:g} minutes", flush=True)
            results["parts"][part.name] = run(part, Path(folder), rehearse=options.rehearse)
            atomic_write(options.out / f"{stem}.json", (json.dumps(results, indent=1) + "\n").encode())
            atomic_write(options.out / f"{stem}.md", markdown(results).encode())
    print(markdown(results))
    return 0 if all(part.get("passed", True) for part in results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
