"""The wheels, installed in a fresh environment as the docs say, serve the bundled pair outside the checkout."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.package.declared import ROOT
from tests.package.test_ray import index
from vllm_adaptive_tree.version import __version__
from vllm_adaptive_tree.versions import is_supported

README, INSTALL, START = ((ROOT / name).read_text() for name in ("README.md", "docs/install.md", "docs/index.md"))
MB = 1e6


class Installed(NamedTuple):
    binaries: Path  # of the fresh environment
    elsewhere: Path  # a folder outside every checkout

    def run(self, *command: str) -> str:
        """Standard output and error of a command of the fresh environment."""
        ended = _run([str(self.binaries / command[0]), *command[1:]], self.elsewhere, self.binaries)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout


def documented(title: str) -> list[str]:
    """The commands of the first block of shell behind `title`, in docs/install.md."""
    found = re.search(rf"^\*\*{title}\*\*.*?^```bash\n(.*?)^```", INSTALL, re.MULTILINE | re.DOTALL)
    assert found, f"docs/install.md has no block behind {title}"
    return found[1].replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean one, with the wheels in its `dist`."""
    folder = tmp_path_factory.mktemp("checkout")
    left_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("packaging", "requirements", "vllm_adaptive_tree"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
    for name in ("LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    assert all("`make wheels`" in page for page in (README, INSTALL))
    built = _run(["make", "wheels"], folder, Path(sys.executable).parent)
    assert built.returncode == 0, built.stdout
    return folder


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    [install, _] = documented("On a CPU")
    [index] = set(re.findall(r"--extra-index-url \S+(?=`)", INSTALL))
    try:
        for command in (install, f"{install} {index}"):
            done = _run(["bash", "-c", command], checkout, folder / "bin")
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout
        yield Installed(folder / "bin", tmp_path_factory.mktemp("elsewhere"))
    finally:
        shutil.rmtree(folder)  # gigabytes


def test_the_plugin_is_small_and_the_pair_a_wheel_of_its_own(checkout: Path) -> None:
    plugin, pair = sorted((checkout / "dist").iterdir())
    assert plugin.name.startswith(f"vllm_adaptive_tree-{__version__}-")
    assert pair.name.startswith("vllm_adaptive_tree_demo_pair-")
    assert plugin.stat().st_size < 1 * MB
    # head of SmolLM2 19.7, target 11.9, one-forward head 3.6, head 2.0, draft 1.2 before compression
    assert pair.stat().st_size < 36 * MB
    assert not [name for name in _contents(plugin) if "demo_pair" in name or name.startswith("tests")]
    assert _contents(plugin) >= {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "vllm_adaptive_tree").rglob("*")
        if path.suffix in {".py", ".txt", ".json", ".safetensors", ".typed"} and "demo_pair" not in path.parts
    }
    folder = ROOT / "vllm_adaptive_tree" / "demo_pair"
    files = {path.relative_to(ROOT).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in _contents(pair) if ".dist-info/" not in name} == files


def test_the_sdist_holds_what_the_wheel_does(checkout: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    built = _run([sys.executable, "-c", code], checkout, Path(sys.executable).parent)
    assert built.returncode == 0, built.stdout
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wheel = {name for name in _contents(min((checkout / "dist").iterdir())) if ".dist-info/" not in name}
    assert wheel | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert not [name for name in names if "demo_pair" in name]
    assert archive.stat().st_size < 1 * MB


def test_the_command_starts(installed: Installed) -> None:
    assert installed.run("vllm-adaptive-tree", "--version").strip() == __version__
    assert "usage: vllm serve [model_tag] [options]" in installed.run("vllm-adaptive-tree", "serve", "--help")


def test_no_requirement_is_missing(installed: Installed) -> None:
    """`pip check` finds nothing but what `requirements/cpu.txt` leaves out."""
    ended = _run([str(installed.binaries / "pip"), "check"], installed.elsewhere, installed.binaries)
    lines = [
        line for line in ended.stdout.splitlines() if "which is not installed" in line or " has requirement " in line
    ]
    left_out = ("torchvision", "torchaudio", "torchcodec")
    assert [line for line in lines if not line.removesuffix(", which is not installed.").endswith(left_out)] == []


def test_one_completion(installed: Installed) -> None:
    """Greedy, with trees on the bundled pair: the text of the target alone, as docs/index.md shows it."""
    pair = json.loads(
        installed.run(
            "python",
            "-c",
            "import json, vllm_adaptive_tree as us; print(json.dumps(us.__path__[0] + '/demo_pair'))",
        )
    )
    assert Path(pair).is_relative_to(installed.binaries.parent)
    request = re.search(r"localhost:8000/v1/completions.*?-d '(.*?)'", START, re.DOTALL)
    shown = re.search(r'^\{"id":"cmpl-.*?"text":"(.*?)","finish_reason"', START, re.MULTILINE)
    assert request
    assert shown
    with serving(installed, pair) as url:
        body = json.loads(request[1])
        answer = json.loads(_ask(f"{url}/v1/completions", body))
        metrics = _ask(f"{url}/metrics").decode()
    assert "vllm:adaptive_tree_nodes_total{" in metrics
    text = answer["choices"][0]["text"]
    assert text == alone(f"{pair}/target", body["prompt"], body["max_tokens"])
    assert text == json.loads(f'"{shown[1]}"')


@contextlib.contextmanager
def serving(installed: Installed, pair: str) -> Iterator[str]:
    """The documented `vllm-adaptive-tree serve`, with the bundled pair in the place of TARGET and DRAFT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    [_, serve] = documented("On a CPU")
    command = shlex.split(serve.replace("TARGET", f"{pair}/target").replace("DRAFT", f"{pair}/draft"))
    assert command[0] == "vllm-adaptive-tree"
    assert json.loads(command[-1])["method"] == "adaptive_tree"
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--served-model-name", "demo", "--max-model-len", "512"]
    log = installed.elsewhere / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(installed.binaries / command[0]), *command[1:]],
            cwd=installed.elsewhere,
            env=_environment(installed.binaries),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                assert server.poll() is None, log.read_text()[-5000:]
                with contextlib.suppress(OSError):
                    _ask(f"{url}/health")
                    break
                time.sleep(0.5)
            yield url
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, log.read_text()[-5000:]
        finally:
            if server.poll() is None:
                server.kill()


def alone(target: str, prompt: str, tokens: int) -> str:
    """Text of the target alone, in plain PyTorch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    given = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**given, max_new_tokens=tokens, do_sample=False)[0, given["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids))


def test_readme_has_the_same_commands() -> None:
    """Its table: a row for a CPU, for a GPU, and for a checkout, which `.ci/run` tries."""
    rows = re.findall(r"^\| .+? \| `(.+?)` \| `.+?` \|$", README, re.MULTILINE)
    assert rows == [documented("On a CPU")[0], documented("On an NVIDIA GPU")[0], "make demo"]
    assert "\nmake demo\n" in (ROOT / ".ci" / "run").read_text()


def test_the_gpu_command_resolves(checkout: Path) -> None:
    """By uv, from the index's metadata, with the wheels that were built: nothing is installed."""
    [install, _] = documented("On an NVIDIA GPU")
    pip, verb, *arguments = shlex.split(install)
    assert (pip, verb) == ("pip", "install")
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--no-header", *index()]
    required = subprocess.run(
        [*command, *arguments[:-1], "-"], input=arguments[-1], cwd=checkout, capture_output=True, text=True
    )
    assert required.returncode == 0, required.stderr
    found = dict(re.findall(r"^([\w-]+)==(\S+)", required.stdout, re.MULTILINE))
    assert found["vllm-adaptive-tree"] == __version__
    assert is_supported(found["vllm"])
    assert any(name.startswith("nvidia-") for name in found)


def _contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {*archive.namelist()}


def _ask(url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def _environment(binaries: Path) -> dict[str, str]:
    """This process's, without what would let the fresh environment see the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {"PATH": f"{binaries}{os.pathsep}{kept['PATH']}", "VIRTUAL_ENV": str(binaries.parent)}
    kept |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PIP_NO_COMPILE": "1"}
    return kept


def _run(command: list[str], folder: Path, binaries: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=_environment(binaries), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
