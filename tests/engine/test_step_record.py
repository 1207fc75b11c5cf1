"""The record of an engine's steps: against the trees that its runner verified, and what its requests got."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, Engines, TreeSpy, generate, metric, tree
from vllm_adaptive_tree.engine.metrics import step_record
from vllm_adaptive_tree.engine.metrics.step_record import VARIABLE, StepRecord
from vllm_adaptive_tree.report import viewer
from vllm_adaptive_tree.trees import TokenTree, TreeBatch

PATH = torch.tensor([[0, -1]])


def test_what_an_engine_records(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that cuts some nodes, and some trees to the last node."""
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv(VARIABLE, str(file))
    llm = engines.start(tree(12, budget=9))
    monkeypatch.delenv(VARIABLE)
    spy = TreeSpy(llm, monkeypatch)
    outputs = generate(llm, PROMPTS[:3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    record = viewer.read(file, 10_000)
    assert record["header"]["method"] == "opt_tree"
    verified = Counter[TokenTree]()
    for step in record["steps"]:
        tokens, parents, size = step["tokens"], step["parents"], step["verified"]
        TokenTree(tuple(tokens), tuple(parents)).check_integrity()
        assert len(step["values"]) == len(tokens) >= size
        assert all(0 < value <= 1 for value in step["values"])
        assert all(step["values"][node] <= step["values"][parents[node]] for node in range(size) if parents[node] >= 0)
        assert [tokens[node] for node in step["accepted"]] == step["emitted"][:-1]
        assert all(node < size for node in step["accepted"])
        verified[TokenTree(tuple(tokens[:size]), tuple(parents[:size]))] += 1
    assert {one for one in verified if len(one)} == {one for one in spy.trees if len(one)}
    assert sum(step["verified"] < len(step["tokens"]) for step in record["steps"]) > 10
    assert metric(llm, "adaptive_tree_nodes") == sum(step["verified"] for step in record["steps"])
    names = sorted({step["request"] for step in record["steps"]}, key=lambda name: int(name.partition("-")[0]))
    assert len(names) == 3
    for name, output, prompt in zip(names, outputs, PROMPTS, strict=False):
        got = [token for step in record["steps"] if step["request"] == name for token in step["emitted"]]
        assert got[: len(output.token_ids) - 1] == list(output.token_ids[1:])
        first = llm.get_tokenizer().decode([output.token_ids[0]])
        assert record["given"][name] == prompt + first
        assert "".join(record["texts"][str(token)] for token in got[:19]).isascii()
    assert '"request"' in viewer.page(record)


def one_step(record: StepRecord) -> None:
    tokens, parents = torch.tensor([[3, 4]]), torch.tensor([[-1, 0]])
    record.drafted(["a"], TreeBatch(tokens, parents, parents + 2, torch.tensor([[-0.1, torch.nan]])))
    record.verified(["a"], [True], [7], [2], PATH, torch.tensor([[3, 9]]), lambda row, start, end: [*range(start, end)])


def test_a_full_disk_ends_the_record_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(step_record.logger, "warning", lambda text, *args: said.append(text % args))
    for path in (Path("/dev/full"), tmp_path / "no folder" / "file"):
        record = StepRecord(path, {}, None)
        one_step(record)
        one_step(record)
        assert record.file is None
    assert ["No space left" in line for line in said] == [True, False]
    assert "No such file" in said[1]


def test_a_file_has_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_record, "LIMIT", 1000)
    file = tmp_path / "steps.jsonl"
    record = StepRecord(file, {"method": "opt_tree"}, None)
    for _ in range(20):
        one_step(record)
    assert record.file is None
    found = viewer.read(file, 100)["steps"]
    assert 2 <= len(found) < 20
    assert 700 < file.stat().st_size <= 1000
    assert found[0]["values"] == [0.9048, 0.0]
    assert json.loads(file.read_text().splitlines()[-1])["step"] == len(found)
