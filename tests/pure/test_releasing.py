"""Requirements of a release, and public files that call the same `make` targets."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.documents import PAGES
from tools.release import problems, section
from vllm_adaptive_tree.versions import window

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
RELEASING = (ROOT / "RELEASING.md").read_text()


def test_what_keeps_a_tag_from_being_released() -> None:
    table = f"\n| 3.1 | {window()} |\n"
    assert problems("v3.1.0", "3.1.0", "# Changelog\n\n## 3.1.0\n", table) == []
    found = problems("v3.1.0", "3.2.0", "## 3.2 (unreleased)\n## 3.2.0rc1\n", table)
    assert [next(word for word in ("tag", "CHANGELOG", "RELEASING") if word in one) for one in found] == [
        "tag",
        "CHANGELOG",
        "RELEASING",
    ]


def test_notes_are_the_section_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## 3.1.0\n\n- New.\n\n### Names\n\n- Old.\n\n## 3.1.0rc1\n\n- Older.\n"
    assert section("3.1.0", changelog) == "- New.\n\n### Names\n\n- Old.\n"
    assert section("3.1.0rc1", changelog) == "- Older.\n"


def test_the_table_ends_with_the_window() -> None:
    rows = re.findall(r"^\| (\d+\.\d+)( \(not released yet\))? \| (.+?) \|$", RELEASING, re.MULTILINE)
    assert rows[-1][2] == window()
    assert [bool(waits) for _, waits, _ in rows[:-1]] == [False] * (len(rows) - 1)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert all(re.search(rf"^## {re.escape(release)}\b", changelog, re.MULTILINE) for release, _, _ in rows)


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.name)
def test_workflows_call_make(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text())["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    lines += [line for job in jobs for line in job.get("strategy", {}).get("matrix", {}).get("run", [])]
    called = [line for line in lines if line != "${{ matrix.run }}"]
    assert called
    for line in called:
        make, target, *_ = line.split()
        assert make == "make"
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), line


def test_the_release_publishes_what_it_has_made() -> None:
    """Every folder that a job reads is one that `make release` has written; PyPI waits for its switch."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    made = {step["with"]["path"] for step in jobs["files"]["steps"] if "upload-artifact" in step.get("uses", "")}
    assert all(f"{folder}/" in MAKEFILE for folder in made)
    [attached] = [step["with"] for step in jobs["github"]["steps"] if "gh-release" in step["uses"]]
    read = {attached["body_path"], *attached["files"].split()}
    assert {Path(path).parent.name for path in read} == {Path(path).name for path in made}
    assert jobs["pypi"]["if"] == "vars.PYPI == 'true'"
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}


def test_the_public_check_is_the_whole_one() -> None:
    """`.ci/run`, line by line."""
    own = re.findall(r"\bmake .+", (ROOT / ".ci" / "run").read_text())
    public = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    assert public["jobs"]["check"]["strategy"]["matrix"]["run"] == own


CITED = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
NUMBERS = {
    one["title"]: one["identifiers"][0]["value"].removeprefix("arXiv:") for one in CITED if one.get("identifiers")
}


def test_the_citation_names_the_five_papers() -> None:
    five = [*NUMBERS.values()][:5]
    assert five == ["2406.17276", "2409.10644", "2410.11744", "2411.05289", "2502.13652"]
    page = (ROOT / "examples" / "papers" / "README.md").read_text()
    assert all(f"[{paper}](https://arxiv.org/abs/{paper})" in page for paper in five)


def test_every_paper_on_the_pages_is_cited() -> None:
    assert len({*NUMBERS.values()}) == len(NUMBERS)
    assert all(one["url"].endswith(NUMBERS[one["title"]]) for one in CITED if one["title"] in NUMBERS)
    assert all(one["authors"] for one in CITED)
    for page in PAGES:
        found = set(re.findall(r"\b\d{4}\.\d{5}\b(?!\d)", page.read_text()))
        assert found <= {*NUMBERS.values()}, page
    assert {one["title"] for one in CITED} == NUMBERS.keys()


def test_every_paper_has_its_title_and_its_authors() -> None:
    """Of DSpark the first ten are known here."""
    for one in CITED:
        named = [author for author in one["authors"] if author.keys() == {"family-names", "given-names"}]
        assert len(named) == len(one["authors"]) - one["title"].startswith("DSpark"), one["title"]
        assert len(one["title"].split()) > 2


@pytest.mark.parametrize("file", [*(ROOT / ".github").rglob("*.yml")], ids=lambda file: file.name)
def test_templates_parse(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


@pytest.mark.parametrize("address", ["", "https://code.example/OWNER/NAME"])
def test_readme_of_a_wheel(tmp_path: Path, address: str) -> None:
    """Its links are to the repository and the tag where a workflow builds it."""
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "vllm_adaptive_tree/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "vllm_adaptive_tree" / "__init__.py").touch()
    server, _, repository = address.rpartition("/OWNER/")
    given = {"GITHUB_SERVER_URL": server, "GITHUB_REPOSITORY": f"OWNER/{repository}", "GITHUB_REF_NAME": "v1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "PYTHONPATH"))}
    command = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env=environment | (given if address else {}),
        check=True,
        capture_output=True,
        text=True,
    )
    text = (tmp_path / made.stdout.split()[-1] / "METADATA").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    own = [link for link in links if not link.startswith(f"{address}/")]
    assert bool(own) != bool(address)
    if address:
        assert f"![Three recorded steps on the bundled pair]({address}/raw/v1/docs/figures/steps.svg)" in text
        assert f"({address}/blob/v1/docs/index.md#a-model-that-people-know)" in text
        assert f"Project-URL: Repository, {address}" in text
