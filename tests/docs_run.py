"""Types README's and every page's commands in a fresh environment, and prints a line for each: `make docs-run`.

    python -m tests.docs_run                        # the wheels, the documented CPU install, every page: an hour
    python -m tests.docs_run --only docs/index.md   # one page; --binaries .venv/bin: an environment that is there
    python -m tests.docs_run --short --binaries .venv/bin    # what starts no engine: tests/package/test_docs_run.py

TARGET and DRAFT are the bundled pair, `vllm serve` is `vllm-adaptive-tree serve` as on every CPU, and long runs are
shortened. A server gets one request. What cannot run here says why not.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.documents import PAGES, ROOT, Block, blocks

PAIR = "vllm_adaptive_tree/demo_pair"
LEFT_OUT = {
    r"^(\w+=\S+ )*(make|source|pytest|ruff|python -m tests)\b": "the checkout's own, as CI runs it",
    r"\[cuda|^ray start --address|benchmarks\.gpu|doctor --gpu": "needs a GPU or a second machine",
    r"tensor-parallel|cpu-offload|^serve run|^kubectl|^vllm bench": "needs GPUs",
    r"^ray start": "a cluster that stays; `make demo-ray` starts one and ends it",
    r"^(git|cd)\b|tools\.vllm_diff": "of another repository, or of a release to come",
    r"^pip install": "the environment is made of docs/install.md's line",
    r"benchmarks\.lattice_trees|--kind dspark": "trains or measures for half an hour",
}
HEAVY = (
    r"\bserve\b|^curl|\b(bench|compare|view|train-gate|train-head|calibrate|fetch-model)\b|costs measure|doctor$|_texts"
)
"""Starts an engine, trains, or reads what such a command has written."""
CONFIG = json.dumps({"method": "opt_tree", "model": f"{PAIR}/draft", "num_speculative_tokens": 8})
SHORTER = {
    r"\bTARGET\b": f"{PAIR}/target",
    r"(?<!s,)\bDRAFT\b|/models/draft": f"{PAIR}/draft",
    r"^(\w+=\S+ )*vllm serve": r"\1vllm-adaptive-tree serve",
    r"--max-model-len \d+": "--max-model-len 512",
    r", \.\.\.\}": ', "num_speculative_tokens": 8}',
    r"--speculative-config \.\.": f"--speculative-config '{CONFIG}'",
    r"(bench .*?)--enlarge-to \S+(.*)": r"\1\2",
    r"(vllm-adaptive-tree bench .*)": r"\1 --chains 3 --concurrency 1 --sampled '' --server '' --requests-per-slot 1 "
    "--max-tokens 16 --max-model-len 512 --bursty-seconds 2 --eager --dtype float32",
    r"--out benchmarks/\S+": "--out results",
    r"--minutes \d+(\.\d+)?": "--minutes 1",
    r"--count (40|128)": "--count 12",
    r"(train-gate .*)": r"\1 --max-tokens 32",
    r"(train-gate c2t .*)": r"\1 --nodes 60",
    r"^(vllm-adaptive-tree compare before after)": r"cp -r results before && cp -r results after && \1",
    r'^(vllm-adaptive-tree serve .*("method": "fan"|"model": "again").*)': "pip install --quiet --no-deps "
    r"--no-build-isolation --upgrade --target plugins ./fan ./again && PYTHONPATH=plugins \1",
    r"'texts/\*\*/\*\.txt'": "'docs/*.md'",
}
"""Applied in turn to every command."""
SERVER = " --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 4"
LIMIT = 900
"""Seconds of a command, a server's start included."""


class Line(NamedTuple):
    """A command and what became of it."""

    block: Block
    command: str
    seconds: float = 0.0
    left_out: str = ""
    failed: str = ""
    """The end of what it said."""

    def __str__(self) -> str:
        state = "FAILED" if self.failed else f"left out: {self.left_out}" if self.left_out else "ok"
        shown = self.command if len(self.command) <= 100 else f"{self.command[:97]}..."
        return f"{self.block}  {shown}\n    {state}, {self.seconds:.0f} s" + (f"\n{self.failed}" if self.failed else "")


def commands(block: Block) -> Iterator[str]:
    """The commands of a block of shell, those over several lines in one."""
    text = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        text += line + "\n"
        try:
            shlex.split(text, comments=True)
        except ValueError:  # a quote continues in the next line
            continue
        command = re.sub(r"\s+#\s.*", "", text).strip().removesuffix("&").strip()
        text = ""
        if command:
            yield command.replace(".venv/bin/", "")


class Walk:
    """Runs commands of an environment in a folder that looks like the checkout."""

    def __init__(self, binaries: Path, folder: Path, *, short: bool):
        self.binaries, self.folder, self.short = binaries, folder, short
        self.server: subprocess.Popen[bytes] | None = None
        self.port = 0
        for path in ROOT.iterdir():
            if path.name not in {"build", "dist", "results"} and not path.name.startswith("."):
                (folder / path.name).symlink_to(path)
        self.environment = {"OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"} | variables(binaries)

    def page(self, page: Path) -> Iterator[Line]:
        for block in blocks(page):
            if block.language == "bash":
                yield from self.shell(block)
            elif block.language == "python" and re.search(r"\bLLM\(", block.text):
                yield self.script(block)

    def shell(self, block: Block) -> Iterator[Line]:
        for command in commands(block):
            why = next((why for what, why in LEFT_OUT.items() if re.search(what, command)), "")
            if not why and self.short and re.search(HEAVY, command):
                why = "not in the short form"
            if why:
                yield Line(block, command, left_out=why)
                continue
            for what, other in SHORTER.items():
                command = re.sub(what, other, command)
            begun = time.monotonic()
            if re.search(r"\bvllm-adaptive-tree serve", command):
                failed = self.stopped() or self.serve(command)
            else:
                failed = "" if command.startswith("curl") else self.stopped()
                failed = failed or self.run(command)
            yield Line(block, command, time.monotonic() - begun, failed=failed)
        if failed := self.stopped():
            yield Line(block, "the server ends", failed=failed)

    def script(self, block: Block) -> Line:
        """Python that starts an engine, saved as a file: a process of its own, which the engine's process imports."""
        if self.short:
            return Line(block, "python", left_out="not in the short form")
        begun = time.monotonic()
        names = f'from vllm import LLM\nTARGET, DRAFT = "{PAIR}/target", "{PAIR}/draft"\n'
        (self.folder / "shown.py").write_text(names + block.text.replace('"TARGET"', "TARGET"))
        failed = self.run("python shown.py")
        return Line(block, "python", time.monotonic() - begun, failed=failed)

    def run(self, command: str) -> str:
        """What it said if it failed. An assignment stays for the commands after it."""
        if found := re.fullmatch(r"(\w+)=(\S*)", command):
            self.environment[found[1]] = found[2]
            return ""
        command = command.replace("localhost:8000", f"127.0.0.1:{self.port}")
        with (self.folder / "said.log").open("w+b") as log:
            process = self.started(command, log)
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = f"none after {LIMIT} s"
        said = (self.folder / "said.log").read_text(errors="replace")
        return "" if code == 0 else f"exit code {code}: {said[-2000:]}"

    def serve(self, command: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        with (self.folder / "server.log").open("wb") as log:
            self.server = self.started(command + SERVER.format(port=self.port), log)
        url, end = f"http://127.0.0.1:{self.port}/v1", time.monotonic() + LIMIT
        while time.monotonic() < end and self.server.poll() is None:
            with contextlib.suppress(OSError):
                model = ask(f"{url}/models")["data"][0]["id"]
                asked = {"model": model, "prompt": "import os", "max_tokens": 16, "temperature": 0}
                return "" if ask(f"{url}/completions", asked)["choices"][0]["text"] else "an empty text"
            time.sleep(1)
        said = (self.folder / "server.log").read_text(errors="replace")
        self.stopped()
        return f"no answer: {said[-3000:]}"

    def stopped(self) -> str:
        """End the server, if there is one."""
        if (server := self.server) is None:
            return ""
        self.server = None
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            return "the server did not end within a minute"
        return ""

    def started(self, command: str, log: object) -> "subprocess.Popen[bytes]":
        words = ["bash", "-c", command]
        return subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )


def variables(binaries: Path) -> dict[str, str]:
    """This process's, without what would let another environment see the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PATH": f"{binaries}{os.pathsep}{kept['PATH']}", "VIRTUAL_ENV": str(binaries.parent)}


def ask(url: str, body: object = None) -> dict[str, list[dict[str, str]]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, list[dict[str, str]]] = json.loads(answer.read())
    return found


def fresh(folder: Path) -> Path:
    """The binaries of an environment with the wheels, made as README's table of installs says."""
    [install] = re.findall(r"`(pip install --no-deps -r requirements/cpu\.txt .*?)`", (ROOT / "README.md").read_text())
    subprocess.run(["make", "wheels", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    venv.create(folder, with_pip=True)
    subprocess.run(["bash", "-c", install], cwd=ROOT, env=variables(folder / "bin"), check=True)
    return folder / "bin"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="only what starts no engine")
    parser.add_argument("--only", nargs="+", default=[], metavar="PAGE", help="as docs/index.md")
    parser.add_argument("--binaries", type=Path, help="folder of an environment's commands; default: a fresh one")
    options = parser.parse_args()
    pages = [page for page in PAGES if not options.only or page.relative_to(ROOT).as_posix() in options.only]
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as name:
        binaries = (options.binaries or fresh(Path(name, "environment"))).absolute()
        (folder := Path(name, "checkout")).mkdir()
        walk = Walk(binaries, folder, short=options.short)
        for page in pages:
            for line in walk.page(page):
                print(line, flush=True)
                lines.append(line)
    failed, left = sum(bool(line.failed) for line in lines), sum(bool(line.left_out) for line in lines)
    print(f"{len(lines)} commands: {len(lines) - failed - left} ran, {left} left out, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
