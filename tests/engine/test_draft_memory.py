"""The memory of a draft is printed when the models are loaded, and taken from the KV cache where vLLM sizes it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from tests.engine import heads
from tests.engine.engines import DRAFT, TARGET, V2, Engines, runner_of, tree
from tests.engine.heads import CONFIG, HIDDEN, VOCABULARY
from vllm_adaptive_tree.engine.preview import Arguments, preview
from vllm_adaptive_tree.engine.startup import finish as startup
from vllm_adaptive_tree.engine.startup.draft_memory import DraftMemory, LevelBuffers

FLOAT = 4
NODES, DEPTH, REQUESTS = 6, 3, 4
KV = 2 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * FLOAT  # of a head, which has one layer


def stored(folder: str) -> int:
    """Bytes of the tensors of a file that vLLM loads."""
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return sum(one.numel() * one.element_size() for name, one in tensors.items() if name != "t2d")


def start(engines: Engines, monkeypatch: pytest.MonkeyPatch, draft: str) -> tuple[DraftMemory, list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(startup.logger, "info", lambda text, *values: lines.append(text % values))
    spec = {**tree(NODES, max_depth=DEPTH), "model": draft}
    runner = runner_of(engines.start(spec, max_num_seqs=REQUESTS))
    return runner.draft_memory, [line for line in lines if "emory of each rank" in line or "come on top" in line]


@pytest.mark.parametrize("reduced", [False, True])
def test_a_head(engines: Engines, reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = heads.eagle3(tmp_path / "draft", reduced=reduced)
    memory, lines = start(engines, monkeypatch, draft)
    spec, about = {**tree(NODES, max_depth=DEPTH), "model": draft}, Arguments(TARGET, dtype="float32")
    foreseen = preview(spec, about._replace(max_num_seqs=REQUESTS))["memory"]
    assert foreseen["kv_per_token"] == memory.kv
    assert foreseen["level_buffers"] == sum(memory.levels)
    assert foreseen["weights"] == pytest.approx(memory.weights, rel=0.01)
    slots = 1 + NODES * (DEPTH - 1)
    feedback, logits = REQUESTS * slots * HIDDEN * FLOAT, REQUESTS * NODES * VOCABULARY * FLOAT
    assert memory[1:3] == (KV, (feedback, logits))
    assert memory.weights - stored(draft) == 4 * FLOAT, "the scales of attention; the embedding is the target's"
    assert [line.split(":")[0] for line in lines] == [
        "Draft memory of each rank",
        "The size of the KV cache is given",
    ]


def test_a_model_and_a_text(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = start(engines, monkeypatch, DRAFT)
    assert memory.levels.feedback == 0
    assert memory.weights > 2_000_000
    assert start(engines, monkeypatch, "ngram")[0][:3] == (0, 0, memory.levels)


@pytest.mark.skipif(V2, reason="the same function for both")
def test_a_text_has_float32_rows_whatever_the_target_has(engines: Engines) -> None:
    spec = {**tree(NODES, max_depth=DEPTH), "model": "ngram"}
    runner = runner_of(engines.start(spec, max_num_seqs=REQUESTS, dtype="bfloat16"))
    assert runner.draft_memory.levels.logits == REQUESTS * NODES * runner.model_config.get_vocab_size() * FLOAT


@pytest.mark.skipif(V2, reason="the same function for both")
@pytest.mark.parametrize(
    ("given", "left", "warned"), [(None, 10_000, False), (10_700, 10_700, False), (None, 500, True)]
)
def test_levels_are_taken_from_the_cache(
    given: int | None, left: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[Any] = []
    monkeypatch.setattr(startup.logger, "warning", lambda *values: warnings.append(values))
    runner = SimpleNamespace(draft_memory=DraftMemory(0, 0, LevelBuffers(300, 400)))
    worker = SimpleNamespace(model_runner=runner, cache_config=SimpleNamespace(kv_cache_memory_bytes=given))
    assert startup.available_memory(worker, 1_000 if warned else 10_700) == left
    assert bool(warnings) == warned
