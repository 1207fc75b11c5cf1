"""Nodes with other packages installed: folders for their PYTHONPATH, whose `sitecustomize` runs before all else."""

import re
import shutil
from pathlib import Path

import vllm_adaptive_tree

HIDE = """
import sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "vllm_adaptive_tree":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
"""
REPLACE = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

class Replaced:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "vllm_adaptive_tree":
            return PathFinder.find_spec(name, [str(Path(__file__).parent)])

sys.meta_path.insert(0, Replaced)
"""
VLLM = """
import sys, types

sys.modules["vllm._version"] = types.SimpleNamespace(__version__={version!r}, __version_tuple__={parts!r})
"""


def without_package(folder: Path) -> str:
    return _written(folder, HIDE)


def with_version(folder: Path, version: str) -> str:
    """A second copy of this package, of that version and with a changed file."""
    source = Path(vllm_adaptive_tree.__file__).parent
    shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__", "demo_pair"))
    file = folder / source.name / "version.py"
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', file.read_text(), flags=re.MULTILINE)
    file.write_text(f"{text}# of another copy\n")
    return _written(folder, REPLACE)


def with_vllm(folder: Path, version: str) -> str:
    """A vLLM that reports another version."""
    parts = tuple(int(part) for part in version.split("."))
    return _written(folder, VLLM.format(version=version, parts=parts))


def _written(folder: Path, code: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return str(folder)
