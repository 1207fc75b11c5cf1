"""Download of a release's source archive by pip, without running any of its code."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.vllm_diff.sources import ROOT

BACKEND = """
from email.parser import HeaderParser
from pathlib import Path


def prepare_metadata_for_build_wheel(folder, settings=None):
    text = Path("PKG-INFO").read_text(encoding="utf-8")
    fields = HeaderParser().parsestr(text)
    info = Path(folder) / f"{fields['Name']}-{fields['Version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(text, encoding="utf-8")
    return info.name
"""
"""Stand-in for setuptools while pip asks an archive for its metadata, which the archive contains."""


def download(release: str, cache: Path) -> Path:
    """Archive in `cache`, fetched if it is not there.

    Raises:
        RuntimeError: it cannot be fetched; names the remedy.
    """
    archive = cache / f"{ROOT}-{release}.tar.gz"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        backend = Path(scratch) / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(BACKEND)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary=:all:", "--no-build-isolation", "--dest", str(cache), f"{ROOT}=={release}"]
        env = {**os.environ, "PYTHONPATH": scratch, "SETUPTOOLS_USE_DISTUTILS": "stdlib"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode or not archive.exists():
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip left no archive"]
        raise RuntimeError(
            f"the sources of vLLM {release} cannot be fetched ({errors[-1]}); fetch them another way and give --source "
            "the folder that holds vllm/, a wheel or a source archive"
        )
    return archive
