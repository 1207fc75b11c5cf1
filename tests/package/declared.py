"""Requirements that `pyproject.toml` declares, and those that are installed here."""

import json
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BASE = ""
"""Name for the dependencies without an extra."""


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@cache
def declared(extra: str) -> tuple[Requirement, ...]:
    """The requirements of one extra, or of `BASE`, that apply to this machine."""
    lines = project()["optional-dependencies"][extra] if extra else project()["dependencies"]
    return tuple(found for found in map(Requirement, lines) if not found.marker or found.marker.evaluate())


@cache
def closure(requirements: tuple[Requirement, ...]) -> frozenset[str]:
    """Names of the distributions that these bring, as far as they are installed here."""
    found: set[tuple[str, str]] = set()
    names = set()
    pending = [*requirements]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            names.add(name)
            needed = map(Requirement, lines)
            pending += [each for each in needed if not each.marker or each.marker.evaluate({"extra": extra})]
    return frozenset(names)


@cache
def distributions() -> dict[str, set[str]]:
    """Top-level package -> names of the distributions that install it.

    It runs in a process of its own: setuptools adds its vendored packages to the path of one that imported it.
    """
    listing = "import json; from importlib.metadata import packages_distributions as all; print(json.dumps(all()))"
    found = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    return {package: {canonicalize_name(name) for name in names} for package, names in json.loads(found.stdout).items()}
