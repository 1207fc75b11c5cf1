"""Engines on a faked CUDA platform: from engine arguments through vLLM's start-up of a GPU to tokens."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.start import BLOCKS, CROWDED, CUT, ROWS
from tests.engine.heads import XPRESS

ROOT = Path(__file__).parents[2]
TIE = 0.25
"""Logprobs in bfloat16. Rounding moves a logit of the random models by 0.13, so two tokens that are closer than twice
that may change places."""
LARGEST = 32  # graph
HEADS, HEAD_SIZE, NODES, REQUESTS = (2, 4), 64, 8, 3
"""Query heads of a draft or a target."""

FROM_0_33 = pytest.mark.skipif(not XPRESS, reason="vLLM 0.33 is the first that has it")

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")


def started(capability: str, case: str, cache: Path, *graphs: str) -> dict[str, Any]:
    """`cache`: a folder for the certificate of the start-up check."""
    command = [sys.executable, "-m", "tests.cuda.start", capability, case, *graphs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "XDG_CACHE_HOME": str(cache)}
    for name in ("TRITON_INTERPRET", "VLLM_TARGET_DEVICE"):
        environment.pop(name, None)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(lines) == 1
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT"))
    return found


@pytest.mark.parametrize(
    ("capability", "case", "kernel"),
    [
        ("8.0", "qwen3", "FA2"),
        pytest.param("9.0", "head", "FA3", marks=pytest.mark.slow),
        pytest.param("10.0", "moe", "FA4", marks=pytest.mark.slow),
        ("9.0", "fp8", "FA3"),
        pytest.param("10.0", "fp8 checkpoint", "FA4", marks=pytest.mark.slow),
    ],
)
def test_start(capability: str, case: str, kernel: str, tmp_path: Path) -> None:
    found = started(capability, case, tmp_path)
    for name in ("plain", "tree"):
        assert found[name]["kernels"] == [kernel], "vLLM's own choice for this device"
        assert found[name]["warmed_up"], "vLLM runs its kernels before the first request"
    assert found["worker"] == "GPUModelRunner"
    assert found["layers"] == ["TreeFlashAttentionImpl"]
    assert found["checked"] > 0, "the start-up check has launched the kernel, too"
    assert not found["off"], found["verdict"]
    assert found["early"], "the kernels are compiled before the first request"
    assert not found["late"], "and none after it"
    assert found["drafts"] > 0
    assert found["trees"]
    for launch in found["trees"]:
        check_launch(launch, of_8_bits="fp8" in case)
    same_tokens(found["plain"], found["tree"])


@pytest.mark.parametrize(
    ("capability", "case", "graphs"),
    [
        ("9.0", "llama", "FULL_AND_PIECEWISE"),
        ("9.0", "adaptive", "FULL_AND_PIECEWISE"),
        ("9.0", "dspark", "FULL_AND_PIECEWISE"),
        pytest.param("8.0", "dflash2", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "lilicorr", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "xpress", "FULL_AND_PIECEWISE", marks=FROM_0_33),
        pytest.param("8.0", "qwen3-next", "FULL_AND_PIECEWISE", marks=[pytest.mark.slow, FROM_0_33]),
        pytest.param("8.0", "qwen3.5", "FULL_AND_PIECEWISE", marks=[pytest.mark.slow, FROM_0_33]),
        pytest.param("9.0", "qwen3-vl", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "images", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "lora", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        ("9.0", "latent", "FULL_AND_PIECEWISE"),
        pytest.param("9.0", "latent module", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "latent, draft", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "llama", "PIECEWISE", marks=pytest.mark.slow),
        pytest.param("8.0", "depth first", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        ("9.0", "head", "FULL_AND_PIECEWISE"),
        ("10.0", "moe", "PIECEWISE"),
        pytest.param("10.0", "moe", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
        pytest.param("9.0", "fp8", "FULL_AND_PIECEWISE", marks=pytest.mark.slow),
    ],
)
def test_graphs(capability: str, case: str, graphs: str, tmp_path: Path) -> None:
    """An engine with CUDA graphs, recorded on tapes, says what one without any does."""
    found = started(capability, case, tmp_path, graphs)
    assert not found["off"], found["verdict"]
    assert found["drafts"] > 0
    assert not found["late"], "no kernel is compiled after the first request"
    assert case != "head" or "_wait" in found["early"], "it may rest"
    assert (case == "head") == bool(found["costs"]), "a budget that is measured"
    for rounds, replayed in found["costs"]:
        assert replayed >= rounds, "its levels are timed in the graphs that run them"
    assert (case in CROWDED) == (found["preempted"] > 0)
    assert case != "adaptive" or "_look_up" in found["early"], "a piece that is recorded"
    decodes = "FULL" if graphs == "FULL_AND_PIECEWISE" else "PIECEWISE"
    steps = found["steps"]
    for step in steps:
        mode = decodes if not step["prompts"] else "PIECEWISE" if step["rows"] <= LARGEST else "NONE"
        assert (step["mode"], step["rows"] <= step["size"]) == (mode, True), step
    assert case not in CUT or max(step["rows"] for step in steps if not step["prompts"]) == ROWS
    kinds = {(step["prompts"], step["nodes"] > 0, step["rows"] < step["size"]) for step in steps}
    assert kinds >= {(False, True, True), (False, False, True), (True, False, True)}, "trees, rests, prompts; padded"
    together = any(step["prompts"] and step["nodes"] and step["mode"] == "PIECEWISE" for step in steps)
    assert case in CUT or together, "prompts and trees; where trees are cut, requests end in another order"
    run, replayed = found["blocks"]
    assert run == replayed
    assert (run > 0) == (case in BLOCKS)
    same_tokens(found["plain"], found["tree"])
    same_tokens({**found["plain"], "tokens": found["plain_briefly"]}, {"tokens": found["at_rest"]})


def test_a_failed_check_leaves_vllm_s_own_graphs(tmp_path: Path) -> None:
    """Decodes are whole graphs again, without our kernel, and say what vLLM's do."""
    found = started("9.0", "fails", tmp_path, "FULL_AND_PIECEWISE")
    assert found["off"]
    assert found["drafts"] == 0
    assert not found["trees"]
    assert found["tree"]["tokens"] == found["plain"]["tokens"]
    decodes = [step for step in found["steps"] if not step["prompts"]]
    assert decodes
    for step in decodes:
        assert (step["mode"], step["nodes"], step["rows"] <= step["size"]) == ("FULL", 0, True), step


def check_launch(launch: dict[str, Any], *, of_8_bits: bool) -> None:
    """The arguments are those of vLLM's own buffers, read where they are. `of_8_bits`: cache and queries are."""
    half = "torch.bfloat16"
    stored = "torch.float8_e4m3fn" if of_8_bits else half
    (rows, heads, size), strides, dtype = launch["query"]
    assert heads in HEADS
    assert (size, strides[-1], dtype) == (HEAD_SIZE, 1, stored)
    assert launch["out"][0] == [rows, heads, size]
    assert launch["out"][2] == half
    for name in ("keys", "values"):
        (_, block, kv_heads, width), (per_block, per_slot, per_head, step), dtype = launch[name]
        assert (kv_heads, width, step, dtype) == (2, HEAD_SIZE, 1, stored)
        # vLLM's [blocks, heads, block_size, 2 * head_size], the heads of a slot side by side, without a copy
        assert (per_head, per_slot, per_block) == (2 * width, 2 * width * kv_heads, 2 * width * kv_heads * block)
    (requests,), _, dtype = launch["context"]
    assert 1 <= requests <= REQUESTS
    assert dtype == "torch.int32"
    assert launch["row_start"][::2] == [[requests + 1], "torch.int32"]
    assert launch["block_table"][0][0] == requests
    assert launch["block_table"][2] == "torch.int32"
    (masks, words), _, dtype = launch["ancestors"]
    assert masks >= rows, "a buffer that never moves, or of a level"
    assert (words, dtype) == (1, "torch.int64")
    assert requests <= rows <= requests * (2 + NODES), "a path of so many nodes, the roots before and behind it"
    assert launch["scale"] == HEAD_SIZE**-0.5


def same_tokens(plain: dict[str, Any], tree: dict[str, Any]) -> None:
    """Each request up to the first tie."""
    for mine, theirs, best in zip(tree["tokens"], plain["tokens"], plain["best_two"], strict=True):
        assert len(mine) == len(theirs)
        at = next((i for i, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other), None)
        if at is not None:
            first, second = best[at]
            assert first - second < TIE, f"token {at}: {mine} {theirs}"
