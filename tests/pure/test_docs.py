"""README and docs say what the code does: commands, options, log lines, metrics, links, and the picture."""

import argparse
import ast
import importlib
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.documents import PAGES, ROOT, all_blocks, anchors, commands, configs, links
from tools import picture
from vllm_adaptive_tree.cli.main import COMMANDS
from vllm_adaptive_tree.config import OUR_KEYS, VLLM_KEYS, TreeOptions
from vllm_adaptive_tree.proposers import METHODS, PROPOSERS, MethodOptions
from vllm_adaptive_tree.report import viewer

README = ROOT / "README.md"
PACKAGE = ROOT / "vllm_adaptive_tree"
SOURCES = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
MAKEFILE = (ROOT / "Makefile").read_text()
OTHERS = {"cd", "curl", "git", "kubectl", "lint-imports", "mypy", "ray", "ruff", "serve", "source", "vllm"}
"""Commands of others; `vllm serve` is parsed in tests/engine/test_documented.py."""
SHELL = all_blocks("bash")
named = pytest.mark.parametrize("block", SHELL, ids=str)


@named
def test_commands_are_there(block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.txt").write_text("import os\n")  # what earlier commands of the page write
    shutil.copy(PACKAGE / "proposers" / "defaults" / "c2t.safetensors", tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in commands(block):
        name, rest = words[0].removeprefix(".venv/bin/"), words[1:]
        if name == "vllm-adaptive-tree":
            check_command(rest)
        elif name == "make":
            targets = [word for word in rest if "=" not in word]
            assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets), words
            assert all(
                f"$({word.split('=')[0]})" in MAKEFILE or f"$(if $({word.split('=')[0]})" in MAKEFILE
                for word in rest
                if "=" in word
            ), words
        elif name in ("python", "pytest"):
            check_python(rest if name == "python" else ["-m", "pytest", *rest])
        elif name == "pip":
            check_pip(rest)
        else:
            assert name in OTHERS, words


def check_command(words: list[str]) -> None:
    """By the command's own parser."""
    if words[0] in ("serve", "--version", "--help"):
        return
    assert words[0] in COMMANDS
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"vllm_adaptive_tree.cli.{words[0].replace('-', '_')}").add_arguments(parser)
    try:
        parser.parse_args(words[1:])
    except SystemExit:
        pytest.fail(f"refused: {shlex.join(words)}")


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        module, rest = words[1], words[2:]
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() or find_spec(module), words
        files = [word for word in rest if re.match(r"tests/[\w/.]+$", word)]
    else:
        files = words[:1]
    assert all((ROOT / file).exists() for file in files), words


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for before, word in pairwise(words):
        if before == "-r":
            assert (ROOT / word).is_file(), word
        for found in re.findall(r"vllm-adaptive-tree\[([\w,]+)\]", word):
            assert {*found.split(",")} <= extras.keys(), word


def test_there_is_something_to_check() -> None:
    assert len(SHELL) > 20
    assert sum(words[0].endswith("vllm-adaptive-tree") for block in SHELL for words in commands(block)) > 15
    assert len(configs()) > 8


@pytest.mark.parametrize(("block", "config"), configs(), ids=str)
def test_configurations(block: Any, config: dict[str, Any]) -> None:
    if PROPOSERS.path(config["method"]) is None or config.get("model") == "again":
        assert block.page.name == "extending.md"  # a third party's: tests/engine/test_registry.py
        return
    if config.get("model") == "suffix" and find_spec("arctic_inference") is None:
        pytest.skip("no suffix trees here")
    config = json.loads(json.dumps(config))
    if config.get("tree", {}).get("lookup") == "suffix" and find_spec("arctic_inference") is None:
        config["tree"]["lookup"] = "ngram"
    assert TreeOptions.parse(config)[0].method == config["method"]


@pytest.mark.parametrize("block", all_blocks("python", "toml", "json"), ids=str)
def test_other_blocks_parse_and_import(block: Any) -> None:
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    else:
        for node in ast.walk(ast.parse(block.text.replace("{..}", "{}"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_adaptive_tree"):
                module = importlib.import_module(str(node.module))
                for one in node.names:
                    assert hasattr(module, one.name) or find_spec(f"{node.module}.{one.name}"), ast.unparse(node)


def formats() -> list[re.Pattern[str]]:
    """Every text of the package that something is filled into, or that is long."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "%s" for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            text = "".join(map(str, parts))
            if len(re.sub(r"%[\d.]*[sdf]", "", text)) > 11:
                found.append(re.compile(".+".join(map(re.escape, re.split(r"%[\d.]*[sdf]", text)))))
    return found


def test_log_lines_are_those_of_the_code() -> None:
    patterns = formats()
    lines = [(block, line) for block in all_blocks("log") for line in block.text.splitlines()]
    for block in all_blocks(""):  # messages that are wrapped
        if block.text.startswith(("error: ", "Draft memory ")):
            lines.append((block, block.text.removeprefix("error: ").replace("\n", " ")))
    assert len(lines) > 14
    unknown = [f"{block}: {line}" for block, line in lines if not any(one.fullmatch(line) for one in patterns)]
    assert unknown == []
    assert not any(one.fullmatch("Tree speculative decoding: of something else") for one in patterns)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_and_links(page: Path) -> None:
    text = page.read_text()
    if page.name != "CHANGELOG.md":  # it names what is gone, too
        names = set(re.findall(r"\bvllm:adaptive_tree_(\w+?)(?:_total)?\b", text))
        missing = {name for name in names if f'"{name}"' not in SOURCES and f"adaptive_tree_{name}" not in SOURCES}
        assert missing == set()
        for variable in re.findall(r"\bVLLM_ADAPTIVE_TREE_[A-Z_]+", text):
            assert variable in SOURCES
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"


OPTIONS = (ROOT / "docs" / "options.md").read_text()


def table_of(title: str) -> dict[str, Any]:
    """Option -> default, of the table below a heading of docs/options.md."""
    [section] = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", OPTIONS, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE)
    return {name: json.loads(default) for name, default in rows}


def defaults(options: type[MethodOptions], left_out: set[str]) -> dict[str, Any]:
    values = {one.name: one.default for one in fields(options) if one.name not in left_out}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def test_the_tables_of_options_are_the_dataclasses() -> None:
    common = {one.name for one in fields(MethodOptions)}
    assert table_of("`tree`, all methods") == defaults(MethodOptions, set())
    for name in METHODS:
        options = PROPOSERS.load(str(PROPOSERS.path(name))).Options
        assert table_of(f"`{name}`") == defaults(options, common), name
    for key in (*OUR_KEYS, *VLLM_KEYS):
        assert f"`{key}`" in OPTIONS


def test_every_method_is_on_the_page_of_methods() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    assert all(f"\n| `{name}` | " in text for name in METHODS)
    for file in (ROOT / "examples" / "papers").glob("*.json"):
        assert f"papers/{file.name})" in text
        assert f"\n| `{file.name}` | " in (ROOT / "examples" / "papers" / "README.md").read_text()


def test_readme_is_short_and_its_number_was_measured() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    shown = re.findall(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", text)
    assert len(shown) == 4
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    for file in (ROOT / "benchmarks" / "results").rglob("*.json"):
        found = json.loads(file.read_text())
        for row in found.get("rows", []) if isinstance(found, dict) else []:
            for ratio in (row.get("to_base"), row.get("to_best_chain")) if isinstance(row, dict) else ():
                if isinstance(ratio, dict):
                    measured += "{median:.2f} [{low:.2f}, {high:.2f}]\n".format(**ratio)
    assert [one for one in shown if one not in measured] == []


def test_the_proposal_for_upstream_counts_the_diff() -> None:
    lines = (ROOT / "patches" / "vllm-0.33.diff").read_text().splitlines()
    added, removed = (
        sum(re.match(rf"{sign}(?!{sign}{sign} )", line) is not None for line in lines) for sign in (r"\+", "-")
    )
    files = sum(line.startswith("diff --git") for line in lines)
    text = (ROOT / "docs" / "upstream.md").read_text()
    assert files == 7
    assert f"{added} lines in, {removed} out, seven files" in text


def test_the_pictures_are_of_the_record() -> None:
    record = viewer.read(picture.RECORD, 10_000)
    for name, draw in picture.PICTURES.items():
        drawn = (picture.FIGURES / name).read_text()
        assert drawn == draw(record), f"python -m tools.picture draws another {name}"
        assert len(drawn) < 60_000
    steps = record["steps"]
    tokens = sum(len(step["emitted"]) for step in steps)
    assert f"{len(steps)} steps, {tokens} tokens" in README.read_text()


def test_the_record_is_what_the_models_do() -> None:
    """The drawn steps again, by `reference.py` in plain PyTorch: the same trees, the same tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_adaptive_tree.methods import resolve
    from vllm_adaptive_tree.reference import decode_step

    pair = PACKAGE / "demo_pair"
    target, draft = (AutoModelForCausalLM.from_pretrained(pair / name, dtype="float32") for name in ("target", "draft"))
    given = AutoTokenizer.from_pretrained(pair / "target")(picture.PROMPT, return_tensors="pt")
    text = target.generate(**given, max_new_tokens=picture.TOKENS, do_sample=False)[0].tolist()
    options = TreeOptions.parse({**picture.CONFIG, "model": str(pair / "draft")})[0]
    proposer = resolve(options).proposer
    for step in viewer.read(picture.RECORD, 10_000)["steps"][picture.STEPS]:
        found = decode_step(
            target,
            draft,
            text[: step["position"] + 1],
            proposer=proposer,
            rule="target_only",
            nodes=picture.NODES,
            temperature=0,
            draft_temperature=options.tree.temperature(0.0),
        )
        assert found.emitted == step["emitted"]
        assert (found.tokens, found.parents) == (step["tokens"], step["parents"])
