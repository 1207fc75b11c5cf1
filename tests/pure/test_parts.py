"""Examples on disk: written whole or not at all, never mixed with another run's."""

import json
import os
from pathlib import Path

import pytest
import torch

from vllm_adaptive_tree import files
from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.gates.parts import Parts, checksum, write_part

ARGUMENTS = {"kind": "c2t", "model": "target", "tree": {"top_k": 10}, "temperatures": (0.0, 1.0)}


def filled(folder: Path, *counts: int) -> Parts:
    parts = Parts.open(folder, ARGUMENTS)
    for number, count in enumerate(counts):
        columns = {"features": torch.full((count, 3), float(number)), "prompt": torch.full((count,), number)}
        write_part(parts.next_file(), columns, trees=count, progress={"0": None, "1": [5] * (number + 1)})
    return parts


def test_parts_are_read_back_in_their_order(tmp_path):
    filled(tmp_path / "parts", 2, 0, 3)
    parts = Parts.open(tmp_path / "parts", ARGUMENTS)
    columns, trees = parts.load()
    assert columns["features"].tolist() == [[0.0] * 3] * 2 + [[2.0] * 3] * 3
    assert columns["prompt"].tolist() == [0, 0, 2, 2, 2]
    assert trees == 5
    assert parts.progress() == {"0": None, "1": [5, 5, 5]}
    assert [file.name for file in parts.files] == [f"part-0000{n}.safetensors" for n in range(3)]
    assert parts.next_file().name == "part-00003.safetensors"


def test_a_new_run_has_no_progress_and_no_examples(tmp_path):
    parts = Parts.open(tmp_path / "a" / "parts", ARGUMENTS)
    assert parts.progress() == {}
    with pytest.raises(ValueError, match=r"parts holds no examples: no tree was drafted; give more or longer prompts"):
        parts.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, r"\(model: 'target' there, 'other' now\)"),
        ({"tree": {"top_k": 5}, "kind": "sequoia"}, r"kind: 'c2t' there, 'sequoia' now; tree: {'top_k': 10} there, "),
        ({"nodes": 5}, r"nodes: None there, 5 now"),
    ],
)
def test_another_run_s_parts_are_refused(tmp_path, change, message):
    filled(tmp_path / "parts", 1)
    with pytest.raises(ValueError, match=rf"holds the examples of another run .*{message}.*another --out, or delete"):
        Parts.open(tmp_path / "parts", {**ARGUMENTS, **change})
    assert Parts.open(tmp_path / "parts", ARGUMENTS).load().trees == 1


def test_a_run_that_came_to_nothing_binds_nobody(tmp_path):
    filled(tmp_path / "parts")
    (tmp_path / "parts" / "notes").write_text("of the user")
    parts = Parts.open(tmp_path / "parts", {**ARGUMENTS, "model": "other"})
    assert json.loads((parts.folder / "manifest.json").read_text())["model"] == "other"


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match=r"is not empty and holds no manifest.json; give another --out"):
        Parts.open(tmp_path, ARGUMENTS)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    parts = filled(tmp_path / "parts", 2)
    unfinished = parts.folder / f".part-00001.safetensors.77{files.TMP_SUFFIX}"
    unfinished.write_bytes(b"half")
    assert len(parts.files) == 1
    Parts.open(parts.folder, ARGUMENTS)
    assert not unfinished.exists()
    killed_at_once = tmp_path / "other" / f".manifest.json.77{files.TMP_SUFFIX}"
    killed_at_once.parent.mkdir()
    killed_at_once.write_bytes(b"{")
    assert Parts.open(killed_at_once.parent, ARGUMENTS).files == []


@pytest.mark.parametrize("size", [0, 4, 100])
def test_a_truncated_part(tmp_path, size):
    parts = filled(tmp_path / "parts", 2)
    os.truncate(parts.files[-1], size)
    for read in (parts.load, parts.progress):
        with pytest.raises(ValueError, match=r"part-00000.safetensors cannot be read \(.*; delete its folder to begin"):
            read()


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_broken_manifest(tmp_path, text):
    (filled(tmp_path / "parts", 1).folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json cannot be read .*; delete its folder to begin again"):
        Parts.open(tmp_path / "parts", ARGUMENTS)


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "gate.safetensors"
    atomic_write(file, b"old")

    def full_disk(handle: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            atomic_write(file, b"new, and much longer")
    assert file.read_bytes() == b"old"
    before = tmp_path / "a reader's"
    os.link(file, before)
    atomic_write(file, b"new")
    assert (before.read_bytes(), file.read_bytes()) == (b"old", b"new"), "whoever reads the old file reads on in it"
    assert {path.name for path in tmp_path.iterdir()} == {"gate.safetensors", "a reader's"}


def test_the_checksum_tells_prompts_apart():
    assert checksum(["a", "b"]) == checksum(("a", "b")) != checksum(["a b"]) != checksum(["b", "a"])


def test_the_manifest_is_json(tmp_path):
    assert json.loads((filled(tmp_path / "parts").folder / "manifest.json").read_text())["temperatures"] == [0.0, 1.0]
