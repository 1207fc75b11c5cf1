"""The engine's tests on Model Runner V2: a short form of what `MODEL_RUNNER=v2 pytest tests/engine/FILE` runs whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.engines import V2

HERE = Path(__file__).parent
SHORT = (
    [
        "test_methods.py",
        "test_v2_step.py",
        "test_options.py",
        "test_dead_rows.py",
        "test_requests_leave.py",
        "test_drafts.py",
        "test_pairs.py",
        "test_families.py",
        "test_one_forward.py",
        "test_llm_calls.py",
    ],
    "(greedy_and_seeded and k-config) or (fixed_budget and opt_tree) or (waits and mcsd) or (kernels and traversal)"
    " or asynchronous or rests_reads or (go_on and eagle3) or depth_first or dyspec_fills or price_floor"
    " or measured_once or (dead_rows and dyspec) or (old_name and model) or ngram-dyspec or (outgrow and model)"
    " or (test_families and identity and (gemma2] or gpt-oss])) or (greedy_and_seeded and dspark-opt_tree-auto])"
    " or resets_of_the_prefix_cache",
    21,
)
LAWS = "follow and (auto or (dyspec and not top_p) or rrs] or spechub or greedy_multi_draft)"
WHOLE = {
    "methods": (["test_methods.py"], "test_greedy", 17),
    "a law of every kind": (["test_law.py"], LAWS, 6),
    "laws of other drafts": (["test_law.py"], "other_drafts", 5),
    "drafts": (["test_drafts.py"], "", 29),
    "heads of one forward": (["test_one_forward.py", "test_candidate_heads.py"], "", 50),
}
MORE = {
    "structured output": (["test_structured.py"], "", 1),
    "scheduling": (["test_scheduling.py"], "", 8),
    "a step": (["test_v2_step.py"], "", 20),
    "recorded steps": (["test_step_record.py"], "", 3),
    "quantised weights": (["test_quantised.py"], "", 1),
    "two ranks": (["test_tensor_parallel.py"], "", 5),
    "pairs": (["test_pairs.py"], "shorter or outgrow", 3),
    "classes of targets": (["test_families.py"], "identity or random or commit", 70),
    "parameters": (["test_sampling.py"], "", 81),
    "calls": (["test_llm_calls.py"], "", 8),
    "adapters, processors and embeddings": (["test_request_kinds.py"], "", 7),
    "several initial tokens": (["test_initial.py"], "refuses", 1),
    "the doctor": (["test_self_check.py"], "doctors", 1),
}


def run(files: list[str], select: str, count: int, runner: str) -> None:
    """`count`: so many tests are selected at least. What is renamed must not drop out unseen."""
    environment = {**os.environ, "MODEL_RUNNER": runner}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    command += ["-k", select]
    found = subprocess.run(
        [*command, *(str(HERE / file) for file in files)], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    ended = re.findall(r"(\d+) (?:passed|skipped)", found.stdout.splitlines()[-1])
    assert sum(map(int, ended)) >= count, found.stdout[-2000:]


pytestmark = pytest.mark.skipif(V2, reason="it is what runs")


def test_short() -> None:
    run(*SHORT, "v2-async")


def test_what_a_gpu_captures() -> None:
    run(["test_capture.py"], "rehearsal or pieces", 8, "v2-kernels")


@pytest.mark.slow
def test_what_a_gpu_runs() -> None:
    run(["test_capture.py", "test_v2_step.py"], "profile or (fixed_budget and opt_tree)", 3, "v2-kernels")


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole(name: str) -> None:
    run(*WHOLE[name], "v2")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more(name: str) -> None:
    run(*MORE[name], "v2")


def test_self_check() -> None:
    run(["test_self_check.py"], "not doctors", 15, "v2")
