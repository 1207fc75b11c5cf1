"""`vllm-adaptive-tree check`: what a configuration will do, without an engine."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_adaptive_tree.bench.environment import DRAFT, HEAD, LATTICE, TARGET
from vllm_adaptive_tree.cli.main import main


def asked(draft: str = DRAFT, **keys: Any) -> str:
    return json.dumps({"method": "adaptive_tree", "model": draft, "num_speculative_tokens": 24, **keys})


def check(capsys: pytest.CaptureFixture[str], config: str, *arguments: str, target: str = TARGET) -> dict[str, Any]:
    code = main(["check", config, "--model", target, "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["ok"] else 2)
    return found


@pytest.mark.parametrize(
    ("draft", "kind", "levels", "depth"),
    [(DRAFT, "model", None, 10), (HEAD, "eagle3", None, 10), (LATTICE, "dspark", 7, 7), ("ngram", "ngram", None, 16)],
)
def test_what_it_will_do(
    draft: str, kind: str, levels: int | None, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(capsys, asked(draft))
    assert (found["draft"]["kind"], found["draft"]["levels"], found["depth"]) == (kind, levels, depth)
    assert found["rule"] == ("target_only" if draft == "ngram" else "traversal")
    assert (found["lossless"], found["nodes"], found["notes"]) == (True, 24, [])
    assert found["nodes_up_to_requests"]["39"] == 24
    assert found["nodes_up_to_requests"]["256"] == 2


def test_it_starts_neither_an_engine_nor_vllm() -> None:
    code = "import sys; from vllm_adaptive_tree.cli.main import main; main(sys.argv[1:]); print('vllm' in sys.modules)"
    command = [sys.executable, "-c", code, "check", asked(HEAD), "--model", TARGET]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] == "False"
    assert lines[-2].startswith("OK: ")
    assert f"draft: {HEAD} (an EAGLE-3 head)" in lines
    assert (
        "nodes of each request that a step on a GPU has room for: 24 of 1, 24 of 8, 24 of 32, 6 of 128, 2 of 256"
        in lines
    )


def changed(folder: str, tmp_path: Path, **keys: Any) -> str:
    """A folder with the same config.json but for these keys, and no tensors."""
    (tmp_path / "changed").mkdir()
    config = json.loads(Path(folder, "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | keys))
    return str(tmp_path / "changed")


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "belongs into 'tree'" in check(capsys, asked(max_depth=3))["refused"]
    assert "would change the target's distribution" in check(capsys, asked(rejection_sample_method="rrs"))["refused"]
    assert "is an EAGLE-3 head" in check(capsys, asked(), target=HEAD)["refused"]
    assert check(capsys, asked(), "--tensor-parallel-size", "2")["ok"]
    assert (
        "cannot be cut for tensor_parallel_size=3" in check(capsys, asked(), "--tensor-parallel-size", "3")["refused"]
    )
    other = changed(DRAFT, tmp_path, vocab_size=99)
    assert "a vocabulary of 99 tokens and the target one of 2048" in check(capsys, asked(other))["refused"]
    assert "there is no 'none/here' with a config.json" in check(capsys, asked("none/here"))["refused"]
    assert main(["check", asked(nodes=1), "--model", TARGET]) == 2
    assert capsys.readouterr().err.startswith("error: speculative_config['nodes'] has no meaning")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{}", "None is no tree method; use one of"),
        ('{"method": "opt_tre"}', "'opt_tre' is no tree method; did you mean 'opt_tree'? use one of"),
        ('{"method": ["dyspec"]}', "['dyspec'] is no tree method"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_a_line_for_what_is_no_configuration(config: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(["check", config, "--model", TARGET]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said) < 2000


def test_notes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = changed(TARGET, tmp_path, architectures=["StrangeForCausalLM"])
    lossy = asked(method="static_tree", rejection_sample_method="spechub", tree={"allow_lossy": True})
    found = check(capsys, lossy, "--max-num-batched-tokens", "40", target=target)
    assert not found["lossless"]
    assert [note.split(":")[0] for note in found["notes"]] == [
        "StrangeForCausalLM",
        "allow_lossy",
        "max_num_batched_tokens=40 is too small for trees of 24 nodes",
    ]
    assert "bundled pair's" in check(capsys, asked(method="c2t"))["notes"][0]


def test_a_hybrid_target_has_chains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = changed(TARGET, tmp_path, architectures=["Qwen3NextForCausalLM"])
    found = check(capsys, asked("ngram"), target=target)
    assert found["notes"] == ["its trees are chains, which need vLLM 0.33"]
    refused = check(capsys, asked("ngram", method="opt_tree"), target=target)["refused"]
    assert "'opt_tree' drafts branches" in refused


def test_vllms_own_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which the command sets
    found = check(capsys, asked(), "--vllm", "--max-model-len", "512", "--dtype", "float32")
    assert found["vllm"]["dtype"] == "float32"
    assert found["vllm"]["max_model_len"] == 512
    long = check(capsys, asked(), "--vllm", "--max-model-len", "100000")
    assert "max_model_len" in long["refused"]
