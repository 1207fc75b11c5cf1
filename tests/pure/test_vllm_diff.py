"""Changes between two releases, read off their sources: small made-up packages, and the installed vLLM."""

import io
import subprocess
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm_adaptive_tree
from tools.vllm_diff import download
from tools.vllm_diff.__main__ import main
from tools.vllm_diff.comparison import Comparison, compare
from tools.vllm_diff.news import news
from tools.vllm_diff.sources import Sources
from tools.vllm_diff.symbols import Symbols
from tools.vllm_diff.things import Value
from tools.vllm_diff.uses import uses

PACKAGE = Path(vllm_adaptive_tree.__file__).parent

OURS = """
from vllm.worker import Runner, step
from vllm import worker
from vllm.batch import Batch


class Ours(Runner):
    def __init__(self, config):
        super().__init__(config)
        self.mine = 1

    def load(self, weights):
        return self.prepare(weights, self.batch.size)

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def use(batch: Batch, ours: Ours):
    step(batch.rows, width=2)
    worker.DEPTH
    with swapped(worker, "Drafter", Ours):
        return ours.batch.size + ours.mine
"""
VLLM = {
    "__init__.py": "",
    "worker.py": """
from .base import Base
from .batch import Batch, Drafter

DEPTH = 2


class Runner(Base):
    def __init__(self, config):
        super().__init__(config)

    def load(self, weights):
        pass


def step(rows, width, *, wide=False):
    pass
""",
    "base.py": """
from vllm.batch import Batch


class Root:
    def prepare(self, weights, size):
        pass

    def forward(self, rows):
        pass


class Base(Root):
    def __init__(self, config):
        self.batch = Batch(config)
        self.helper = config.helper
""",
    "batch.py": """
from dataclasses import dataclass


class Drafter:
    pass


@dataclass
class Batch:
    rows: list[int]
    size: int = 0
""",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def compared(folder: Path, ours: str = OURS, **changed: tuple[str, str] | str) -> Comparison:
    """`changed`: file without suffix -> (old text, new text) or the whole new file."""
    files = dict(VLLM)
    for name, change in changed.items():
        if isinstance(change, tuple):
            assert change[0] in VLLM[f"{name}.py"]
            files[f"{name}.py"] = VLLM[f"{name}.py"].replace(*change)
        else:
            files[f"{name}.py"] = change
    old = Symbols(Sources.open(written(folder / "old" / "vllm", VLLM)))
    new = Symbols(Sources.open(written(folder / "new" / "vllm", files)))
    return compare(uses(written(folder / "ours", {"code.py": ours})), old, new)


def said(found: Comparison) -> dict[str, str]:
    return {change.symbol: change.what for change in found.changes}


def test_nothing_has_moved(tmp_path):
    found = compared(tmp_path)
    assert found.changes == []
    assert found.unfollowed == []
    assert found.followed == 13


def test_gone(tmp_path):
    found = compared(tmp_path, worker=("DEPTH = 2", ""))
    assert said(found) == {"vllm.worker.DEPTH": "gone"}
    assert found.changes[0].places == ("code.py:21",)


def test_moved_to_another_module(tmp_path):
    text = VLLM["worker.py"]
    function = text[text.index("def step") :]
    found = compared(tmp_path, worker=(function, ""), steps=function)
    assert said(found) == {"vllm.worker.step": "moved to vllm.steps"}


def test_a_module_that_is_gone(tmp_path):
    files = {name: text.replace("batch import", "rows import") for name, text in VLLM.items() if name != "batch.py"}
    old = Symbols(Sources.open(written(tmp_path / "old" / "vllm", VLLM)))
    new = Symbols(Sources.open(written(tmp_path / "new" / "vllm", {**files, "rows.py": VLLM["batch.py"]})))
    found = compare(uses(written(tmp_path / "ours", {"code.py": OURS})), old, new)
    assert said(found) == {"vllm.batch.Batch": "moved to vllm.rows"}


def test_a_re_export_is_followed(tmp_path):
    text = VLLM["worker.py"]
    function = text[text.index("def step") :]
    found = compared(tmp_path, worker=(function, "from .steps import step"), steps="from ._s import *\n", _s=function)
    assert found.changes == []


def test_a_parameter_of_a_function_that_is_called(tmp_path):
    old = "def step(rows, width, *, wide=False"
    for number, (new, what) in enumerate(
        {
            "def step(rows, breadth": "parameters -width, +breadth",
            "def step(rows, width, depth": "parameters +depth",
            "def step(size, rows, width": "parameters rows -> size, +rows",
            "def step(lines, width": "parameters rows -> lines",
            "def step(rows, width, depth=1": None,
            "def step(*rows, **others": None,
        }.items()
    ):
        found = said(compared(tmp_path / str(number), worker=(old, new)))
        assert found == ({} if what is None else {"vllm.worker.step": what}), new


def test_an_override_must_take_what_vllm_passes(tmp_path):
    for number, new in enumerate(("def load(self, weights, dummy)", "def load(self, weights, dummy=False)")):
        found = compared(tmp_path / str(number), worker=("def load(self, weights)", new))
        assert said(found) == {"vllm.worker.Runner.load": "parameters +dummy"}
        assert found.changes[0].places == ("code.py:12",)
    # this one takes anything
    assert compared(tmp_path / "open", base=("def forward(self, rows)", "def forward(self, rows, mask)")).changes == []


def test_a_method_of_a_base_class_of_a_base_class(tmp_path):
    found = compared(tmp_path / "gone", base=("def prepare(", "def arrange("))
    assert said(found) == {"vllm.worker.Runner.prepare": "gone"}
    found = compared(tmp_path / "size", base=("size):", "count, extra):"))
    assert said(found) == {"vllm.worker.Runner.prepare": "parameters size -> count, +extra"}
    changed = VLLM["base.py"].replace(
        "class Base(Root):", "class Base(Root):\n    def prepare(self, weights, size): ...\n"
    )
    assert compared(tmp_path / "nearer", base=changed.replace("prepare", "arrange", 1)).changes == []


def test_attributes_that_a_base_class_assigns(tmp_path):
    found = compared(tmp_path, base=("self.batch = ", "self.rows = "))
    assert said(found) == {"vllm.worker.Runner.batch": "gone"}
    assert found.changes[0].places == ("code.py:13", "code.py:23")


def test_attributes_of_attributes(tmp_path):
    found = compared(tmp_path, batch=("size: int = 0", "count: int = 0"))
    assert said(found) == {"vllm.worker.Runner.batch.size": "gone"}


def test_a_function_that_became_an_attribute(tmp_path):
    found = compared(tmp_path, base=("    def prepare", "    @property\n    def prepare"))
    assert said(found) == {"vllm.worker.Runner.prepare": "function became attribute"}


def test_a_name_that_is_replaced_in_a_module(tmp_path):
    found = compared(tmp_path, worker=("Batch, Drafter", "Batch"))
    assert said(found) == {"vllm.worker.Drafter": "moved to vllm.batch"}


def test_a_name_of_ours_that_vllm_takes_too(tmp_path):
    found = compared(tmp_path, base=("self.helper", "self.mine"))
    assert said(found) == {"vllm.worker.Runner.mine": "new there, and a name of ours"}


def test_what_reading_cannot_follow_is_counted(tmp_path):
    ours = OURS.replace("self.batch.size", "self.helper.size")
    found = compared(tmp_path, ours)
    assert found.changes == []
    assert found.unfollowed == ["vllm.worker.Runner.helper.size"]


def test_archives_are_read_as_they_are(tmp_path):
    written(tmp_path / "release-1" / "vllm", VLLM)
    wheel, archive = tmp_path / "release.whl", tmp_path / "release.tar.gz"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in VLLM.items():
            file.writestr(f"vllm/{name}", text)
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in VLLM.items():
            member = tarfile.TarInfo(f"vllm-1/vllm/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    for source in (tmp_path / "release-1", tmp_path / "release-1" / "vllm", wheel, archive):
        sources = Sources.open(source)
        assert sources.modules == ["vllm", "vllm.base", "vllm.batch", "vllm.worker"]
        assert isinstance(Symbols(sources).find(("vllm", "worker", "Runner", "prepare")), Value)
    with pytest.raises(ValueError, match="does not hold the sources of vLLM"):
        Sources.open(tmp_path)


def test_our_own_uses_are_all_in_the_installed_vllm():
    installed = Symbols(Sources.installed())
    found = compare(uses(PACKAGE), installed, installed)
    assert found.changes == []
    assert found.followed > 100
    assert len(found.unfollowed) < found.followed / 5


def test_the_command(tmp_path, capsys):
    source = written(tmp_path / "vllm", VLLM)
    assert main(["9.9.9", "--source", str(source)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("vllm.v1.worker.cpu_worker.CPUWorker: gone  [engine/cpu_worker.py:") for line in lines)
    assert "to 9.9.9; " in lines[-1]
    spec = find_spec("vllm")
    assert main(["0.32.0", "--source", str(Path(spec.origin).parent)]) == 0
    assert main(["9.9.9", "--source", str(tmp_path / "nowhere")]) == 2


def test_without_a_way_to_fetch_it_the_error_says_what_to_give(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for vllm==9.9.9\n")
    monkeypatch.setattr(download.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"No matching distribution.*give --source"):
        download.download("9.9.9", tmp_path)


def test_what_is_in_the_cache_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(download.subprocess, "run", None)
    (tmp_path / "vllm-9.9.9.tar.gz").touch()
    assert download.download("9.9.9", tmp_path) == tmp_path / "vllm-9.9.9.tar.gz"


def test_new_lines_about_drafts_and_new_callers_of_what_is_replaced(tmp_path):
    """As in vLLM 0.33: no symbol had moved, and a step of Model Runner V2 asked for a field that ours had not."""
    before = {"__init__.py": "", "config/__init__.py": "def check(self):\n    self.limit()\n"}
    runner = "class Runner:\n    def prepare_inputs(self, rows):\n        return rows\n"
    before |= {"v1/__init__.py": "", "v1/worker/__init__.py": "", "v1/worker/runner.py": runner, "other.py": ""}
    after = {
        **before,
        "config/__init__.py": before["config/__init__.py"] + "    self.limit_to_draft()\n    # of a draft\n",
        "v1/worker/runner.py": runner + "\n    def step(self, rows):\n        return self.prepare_inputs(rows)\n",
        "other.py": "drafts = 1\n",
    }
    ours = "from vllm.v1.worker.runner import Runner\nclass Ours(Runner):\n    def prepare_inputs(self, rows): ...\n"
    old, new = (Sources.open(written(tmp_path / name / "vllm", one)) for name, one in (("a", before), ("b", after)))
    found = news(uses(written(tmp_path / "ours", {"code.py": ours})), old, new)
    assert [str(one) for one in found] == [
        "vllm.config:3 (drafts): self.limit_to_draft()",
        "vllm.v1.worker.runner:6 (prepare_inputs): return self.prepare_inputs(rows)",
    ]
