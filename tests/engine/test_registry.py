"""Proposers, rules, drafts and heads of third parties, in an engine that runs in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PAIR, PROMPTS, TARGET, Engines, assert_identical, generate
from vllm_adaptive_tree.cli import new_method

GREEDY, ALL = 4, 6  # the first prompts are decoded greedily, the others sampled


def params(**extra: Any) -> list[dict[str, Any]]:
    return [{"temperature": float(i >= GREEDY), "max_tokens": 32, "ignore_eos": True, **extra} for i in range(ALL)]


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_adaptive_tree import register
from vllm_adaptive_tree.proposers import StaticTree

class Own(StaticTree):
    pass

def main():
    method, rule, target, draft, tree, prompts, params = json.load(sys.stdin)
    try:
        register("own", Own)
    except ValueError as error:
        refused = str(error)
    register("registered", "fan:Fan")
    register("registered", "plain:Plain")
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=512, disable_log_stats=False,
              speculative_config={"method": method, "model": draft, "num_speculative_tokens": 12,
                                  "rejection_sample_method": rule, "tree": {"budget": None, **tree}})
    params = [SamplingParams(**own) for own in params]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print("RESULT" + json.dumps({
        "refused": refused,
        "in_process": hasattr(llm.llm_engine.engine_core, "engine_core"),
        "outputs": [[list(output.token_ids), output.text, output.finish_reason] for output in outputs],
        "nodes": counters["vllm:spec_decode_num_draft_tokens"] / counters["vllm:spec_decode_num_drafts"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
    }))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    outputs = generate(engines.start(), PROMPTS[:ALL], [SamplingParams(**own) for own in params(logprobs=2)])
    engines.shutdown()
    return outputs[:GREEDY]


TEMPLATES = {"fan": new_method.PROPOSER, "plain": new_method.RULE, "again": new_method.DRAFT, "scaled": new_method.HEAD}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: what `new-method` writes, and its metadata."""
    folder = tmp_path_factory.mktemp("installed")
    for name, template in TEMPLATES.items():
        files = new_method.package(name, template)
        (folder / f"{name}.py").write_text(files[f"{name}.py"])
        metadata = folder / f"{name}-0.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        [(group, points)] = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"].items()
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {points[name]}\n")
    return folder


def scaled(folder: Path) -> str:
    """The bundled head as a checkpoint of the template's class."""
    shutil.copytree(PAIR / "head", folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Eagle3Scaled"]}))
    save_file({**weights, "scale": torch.ones(weights["fc.weight"].shape[1])}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("method", "rule", "draft", "tree", "nodes"),
    [
        ("fan", "auto", DRAFT, {"width": 3}, (10, 12)),  # by its entry point
        ("static_tree", "registered", DRAFT, {"shape": [3, 2]}, (7, 9)),  # by `register`
        ("registered", "auto", "again", {"period": 6}, (4, 6)),
        ("adaptive_tree", "auto", "scaled", {}, (10, 12)),  # told by its config.json
    ],
)
def test_third_parties_decode_in_a_spawned_engine(
    plain: list[Any],
    installed: Path,
    method: str,
    rule: str,
    draft: str,
    tree: dict[str, Any],
    nodes: tuple[int, int],
    tmp_path: Path,
) -> None:
    if draft == "scaled":
        draft = scaled(tmp_path / "head")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, script],
        input=json.dumps([method, rule, TARGET, draft, tree, PROMPTS[:ALL], params()]),
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "PYTHONPATH": f"{installed}:{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT"))
    assert "__main__" in found["refused"]
    assert "pkg.module:Name" in found["refused"]
    assert not found["in_process"]
    assert nodes[0] < found["nodes"] <= nodes[1]
    assert found["accepted"] > 0
    names = ("token_ids", "text", "finish_reason")
    assert_identical(
        plain, [SimpleNamespace(**dict(zip(names, output, strict=True))) for output in found["outputs"][:GREEDY]]
    )
