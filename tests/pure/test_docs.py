"""README and docs: commands, configurations, tables of options, links, and the pictures are those of the code."""

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
import yaml
from safetensors import safe_open

from tests.documents import PAGES, ROOT, all_blocks, anchors, commands, configs, links
from tools import pages, picture
from vllm_adaptive_tree.cli.main import COMMANDS
from vllm_adaptive_tree.config import OUR_KEYS, VLLM_KEYS, TreeOptions
from vllm_adaptive_tree.proposers import METHODS, PROPOSERS, MethodOptions
from vllm_adaptive_tree.report import viewer

README = ROOT / "README.md"
PACKAGE = ROOT / "vllm_adaptive_tree"
MAKEFILE = (ROOT / "Makefile").read_text()
OTHERS = {"cd", "curl", "git", "kubectl", "lint-imports", "mypy", "ray", "ruff", "serve", "source", "vllm"}
"""Commands of others; `vllm serve` is parsed in tests/config/test_documented.py."""
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
    if config["method"] not in PROPOSERS or config.get("model") == "again":
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"


OPTIONS = (ROOT / "docs" / "options.md").read_text()


ENGINES = {"LLM", "AsyncLLM", "LLMEngine"}


def unguarded(tree: ast.Module) -> list[str]:
    """Engines that importing the text would start: outside functions and `if __name__ == "__main__":`."""
    found, left = [], list[ast.AST](tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ENGINES:
            found.append(ast.unparse(node.func))
        left += ast.iter_child_nodes(node)
    return found


def test_a_snippet_saved_as_a_file_starts_its_engine_once() -> None:
    """vLLM's engine on a CPU is another process, which imports the file."""
    assert unguarded(ast.parse("from vllm import LLM\nprint(LLM(TARGET).generate('a'))")) == ["LLM"]
    sources = {str(block): block.text.replace("{..}", "{}") for block in all_blocks("python")}
    sources |= {str(file): file.read_text() for file in (ROOT / "examples").rglob("*.py")}
    assert {where: found for where, text in sources.items() if (found := unguarded(ast.parse(text)))} == {}
    shown = [block for block in all_blocks("python") if re.search(r"\bLLM\(", block.text)]
    assert len(shown) >= 2
    assert any(block.page == README and block.runs for block in shown)


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    texts = {*PAGES, *PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")}
    said = [
        (file.relative_to(ROOT).as_posix(), line)
        for file in sorted(texts)
        for line in file.read_text().splitlines()
        if re.search(r"(pip|uv) install[^`|]*vllm-adaptive-tree", line, re.IGNORECASE)
    ]
    assert [line for line in said if "--find-links dist" not in line[1]] == []
    assert len(said) > 5


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
        options = PROPOSERS[name].Options
        assert table_of(f"`{name}`") == defaults(options, common), name
    for key in (*OUR_KEYS, *VLLM_KEYS):
        assert f"`{key}`" in OPTIONS


def test_every_method_is_on_the_page_of_methods() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    assert all(f"\n| `{name}` | " in text for name in METHODS)
    for file in (ROOT / "examples" / "papers").glob("*.json"):
        assert f"papers/{file.name})" in text
        assert f"\n| `{file.name}` | " in (ROOT / "examples" / "papers" / "README.md").read_text()


def test_pages_say_what_the_gate_of_c2t_json_reads() -> None:
    """The paper's reads P; the file names no gate, so it has the bundled one."""
    config = json.loads((ROOT / "examples" / "papers" / "c2t.json").read_text())
    assert "gate" not in config["tree"]
    with safe_open(PACKAGE / "proposers" / "defaults" / "c2t.safetensors", "pt") as gate:
        features = gate.metadata()["features"]
    assert features == "log"
    for page in ("docs/papers.md", "docs/methods.md", "examples/papers/README.md"):
        assert "gate" in (text := (ROOT / page).read_text())
        assert "reads log P" in text


def test_the_site_keeps_numbers_whole_and_has_a_switch_for_its_colours() -> None:
    row = "| 1 | 41.0 [34.7, 42.7] | 1.13 [0.93, 1.21] (5) | 3.2 ± 0.1 | two words [a](b.md) |"
    kept = "| 1 | 41.0_[34.7,_42.7] | 1.13_[0.93,_1.21]_(5) | 3.2_±_0.1 | two words [a](b.md) |"
    assert pages.whole_numbers(row).replace("\N{NO-BREAK SPACE}", "_") == kept
    assert pages.whole_numbers("41.0 [34.7, 42.7]") == "41.0 [34.7, 42.7]"
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert all((ROOT / "docs" / file).is_file() for file in site["extra_css"])
    assert [palette["toggle"]["name"] for palette in site["theme"]["palette"]] == ["Dark", "Light"]
    assert "navigation.footer" in site["theme"]["features"]


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
