"""`adaptive_tree` with every default, on each model runner: each request by its own kind, and a table that learns."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import (
    DRAFT,
    PROMPTS,
    V2,
    Engines,
    TreeSpy,
    assert_identical,
    generate,
    keep_costs,
    runner_of,
    set_costs,
)
from vllm_adaptive_tree.proposers.acceptance_table import SHAPE, AcceptanceTable

NODES, LENGTH = (6, 16) if V2 else (14, 40)  # the interpreter is slow
BATCH = PROMPTS[:4]
GREEDY, CHOSEN, _, _, HOT = range(SHAPE[0])
COSTS: dict[str, Any] = {
    "verify": {"rows": [1, 300], "seconds": [0.5, 0.6]},
    "draft": {"rows": [1, 12], "seconds": [1e-3] * 2},
}
LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.2},
]
MIXED = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=2, **law) for law in LAWS]
REPEATABLE = [0, 2]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "costs.json"


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(), BATCH, MIXED)


def started(engines: Engines, file: Path) -> Any:
    """Engine in which drafting pays."""
    with pytest.MonkeyPatch.context() as patch:
        set_costs(patch, **COSTS)
        config = {"method": "adaptive_tree", "model": DRAFT, "num_speculative_tokens": NODES}
        llm = engines.start({**config, "tree": {"cost_profile": str(file)}})
    keep_costs(llm)
    return llm


def table_of(llm: Any) -> AcceptanceTable:
    table: AcceptanceTable = runner_of(llm).steering.proposer.acceptance
    return table


def test_a_mixed_batch(engines: Engines, plain: list[Any], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = started(engines, file)
    spy, before = TreeSpy(llm, monkeypatch), table_of(llm).chance.clone()
    ours = generate(llm, BATCH, MIXED)
    assert_identical([plain[i] for i in REPEATABLE], [ours[i] for i in REPEATABLE])
    assert [len(output.token_ids) for output in ours] == [LENGTH] * len(BATCH)
    trials = table_of(llm).trials.sum((1, 2, 3))
    assert trials[[GREEDY, CHOSEN, HOT]].min() > 5, "each kind of request has shown its own"
    assert trials.sum() == pytest.approx(trials[[GREEDY, CHOSEN, HOT]].sum())
    assert not (table_of(llm).chance == before).all()
    assert any(len(tree.branches()) > 2 for tree in spy.trees)
    runner_of(llm).profile.due = 0.0
    generate(llm, BATCH[:1], SamplingParams(temperature=0, max_tokens=3))
    assert json.loads(file.read_text())["learnt"]["steering"]["acceptance"]["trials"]


def test_the_next_engine_knows_it(engines: Engines, file: Path) -> None:
    engines.shutdown()  # which writes
    written = json.loads(file.read_text())["learnt"]["steering"]["acceptance"]
    table = table_of(started(engines, file))
    assert table.to_json() == written
    assert table.trials.sum() > 20


def test_a_damaged_table_is_learnt_anew(engines: Engines, file: Path) -> None:
    engines.shutdown()
    profile = json.loads(file.read_text())
    profile["learnt"]["steering"]["acceptance"]["hits"][0] = -1
    file.write_text(json.dumps(profile))
    llm = started(engines, file)
    assert not table_of(llm).trials.any()
    assert len(generate(llm, BATCH[:1], MIXED[:1])[0].token_ids) == LENGTH
