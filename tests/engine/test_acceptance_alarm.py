"""The alarm for a draft that is rejected: it sounds with a draft of another tokenizer, and not with the bundled one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import DRAFT, PROMPTS, TARGET, Engines, generate, metric, runner_of, set_costs, tree
from vllm_adaptive_tree.budget import Plan
from vllm_adaptive_tree.cli.doctor import accepted
from vllm_adaptive_tree.engine.metrics import acceptance_alarm, acceptance_record
from vllm_adaptive_tree.engine.metrics.acceptance_record import records
from vllm_adaptive_tree.engine.metrics.request_steps import ALARM

STEPS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SPECIAL = 3
"""Tokens of the pair, the first ones."""


@pytest.fixture(autouse=True)
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the alarm, which is raised after fewer steps here; records are in a folder of their own."""
    said: list[str] = []
    monkeypatch.setattr(acceptance_record.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(acceptance_alarm, "STEPS", STEPS)
    monkeypatch.setattr(acceptance_record, "folder", lambda: tmp_path / "records")
    return said


def with_another_tokenizer(folder: Path) -> str:
    """The bundled draft in a vocabulary with the same tokens under other numbers."""
    shutil.copytree(DRAFT, folder)
    weights, written = load_file(folder / "model.safetensors"), json.loads((folder / "tokenizer.json").read_text())
    embedding = weights["model.embed_tokens.weight"]  # and head
    others = SPECIAL + torch.randperm(len(embedding) - SPECIAL, generator=torch.Generator().manual_seed(0))
    number = torch.cat([torch.arange(SPECIAL), others])
    weights["model.embed_tokens.weight"] = torch.empty_like(embedding).index_copy_(0, number, embedding)
    save_file(weights, folder / "model.safetensors")
    vocabulary = written["model"]["vocab"]
    written["model"]["vocab"] = {token: int(number[old]) for token, old in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return str(folder)


def alarm_of(llm: Any) -> Any:
    """Once it has said all."""
    found = getattr(llm.llm_engine.engine_core.engine_core.scheduler, ALARM)
    if (thread := found.tell.__self__.thread) is not None:
        thread.join(60)
    return found


def test_a_draft_with_another_tokenizer(engines: Engines, tmp_path: Path, logged: list[str]) -> None:
    other = with_another_tokenizer(tmp_path / "other")
    llm = engines.start({**tree(12), "model": other})
    generate(llm, PROMPTS[:8], GREEDY)
    assert alarm_of(llm).low
    assert metric(llm, "adaptive_tree_low_acceptance") == 1
    (line,) = logged
    assert f"next to nothing of draft {other} (an independent model)" in line
    assert f"of {STEPS} drafted steps" in line
    assert "Likely causes: another tokenizer than the target's? yes: " in line
    (record,) = records()
    assert (record["target"], record["draft"], record["low"]) == (TARGET, other, True)
    assert len(record["causes"]) == 3
    text = accepted(records())
    assert f"for {TARGET}" in text[0]
    assert "TOO LOW" in text[0]
    assert text[1].startswith("  another tokenizer than the target's? yes: ")


def test_the_bundled_pair(engines: Engines, logged: list[str]) -> None:
    llm = engines.start(tree(12))
    hot = SamplingParams(temperature=1.5, seed=1, max_tokens=20, ignore_eos=True)
    generate(llm, PROMPTS[:4], hot)
    assert metric(llm, "spec_decode_num_drafts") > 20
    assert alarm_of(llm).steps == 0
    generate(llm, PROMPTS, GREEDY)
    assert not alarm_of(llm).low
    assert metric(llm, "adaptive_tree_low_acceptance") == 0
    assert not logged
    (record,) = records()
    assert record["accepted"] > 0.3 * record["steps"]
    assert (record["low"], record["causes"]) == (False, [])


def test_look_ups_beside_a_draft_that_rests(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.1, 0.1]})
    llm = engines.start(tree(12, budget="auto", lookup="ngram"))
    budget = runner_of(llm).budget.budget

    def rest(greedy: Any) -> Plan:
        budget.plan = Plan(0, 1e-3)
        return budget.plan

    monkeypatch.setattr(budget, "begin", rest)
    generate(llm, PROMPTS[:4], GREEDY)
    assert metric(llm, "spec_decode_num_drafts") > 10
    assert alarm_of(llm).steps == 0


def test_a_look_up_alone() -> None:
    """Nothing of it can be mended."""
    configs = [
        EngineArgs(model=TARGET, max_model_len=512, speculative_config={**tree(12), "model": draft})
        for draft in (DRAFT, "ngram")
    ]
    assert [acceptance_record.acceptance_alarm(one.create_engine_config()) is None for one in configs] == [False, True]
