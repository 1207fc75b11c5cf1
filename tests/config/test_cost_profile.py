"""The file of a cost profile: what is refused, when it is written, and a disk that is full."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_adaptive_tree import files
from vllm_adaptive_tree.engine.startup import cost_profile
from vllm_adaptive_tree.engine.startup.cost_profile import CostProfile


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama"}', '{"verify": {}}', "[" * 100_000, "7" * 10_000, "\x00\xff", "key"]
)
def test_what_is_somebody_elses_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"\['cost_profile'\]: .*config.json' .*it exists and is no cost profile"):
        cost_profile.check_folder(str(file))
    assert file.read_text() == text


def test_nobodys_home() -> None:
    with pytest.raises(ValueError, match=r"\['cost_profile'\]: '~nobody-there/costs.json' cannot be written"):
        cost_profile.check_folder("~nobody-there/costs.json")


def test_a_gate_trained_anew_makes_another_key(tmp_path: Path) -> None:
    digests = []
    for content in (b"one", b"other"):
        (tmp_path / "gate.safetensors").write_bytes(content)
        digests.append(cost_profile.digest(str(tmp_path / "gate.safetensors")))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a quota, or a file system that was mounted anew without writing: the old profile stays whole, nothing is left
    beside it, the warning says why, and once there is room it is written again."""
    kept, said = CostProfile(tmp_path / "costs.json", {}), list[str]()
    kept.collect = lambda: {"learnt": len(said)}
    kept.write()
    before = kept.path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(cost_profile.logger, "warning", lambda line, *args: said.append(line % args))
        patch.setattr(files.os, "fsync", full)
        for _ in range(3):
            kept.due = 0.0
            kept.tick()
    (line,) = said
    assert str(kept.path) in line
    assert os.strerror(code) in line
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [before]
    kept.write()
    assert kept.path.read_bytes() != before


def test_what_is_written_while_an_engine_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early and then more rarely: a server that is killed after a minute leaves something."""
    now, written = 0, []
    monkeypatch.setattr(cost_profile, "time", SimpleNamespace(monotonic=lambda: now))
    kept = CostProfile(tmp_path / "costs.json", {})
    kept.collect = lambda: (written.append(now), {"learnt": now})[1]
    for now in range(100, 900):  # noqa: B007
        kept.tick()
    assert written == [110, 130, 170, 250, 410, 590, 770]
    assert json.loads((tmp_path / "costs.json").read_text()) == {"key": {}, "learnt": 770}
