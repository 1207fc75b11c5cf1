"""Proposers, rules and drafts of third parties, in an engine that runs in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, TARGET, Engines, assert_identical, generate
from vllm_adaptive_tree import register_acceptance, register_drafter, register_proposer
from vllm_adaptive_tree.proposers import StaticTree

THIRD_PARTY = Path(__file__).parent / "third_party"  # as a folder of installed packages: `fans` and its metadata
GREEDY, ALL = 4, 6  # the first prompts are decoded greedily, the others sampled


def params(**extra: Any) -> list[dict[str, Any]]:
    return [{"temperature": float(i >= GREEDY), "max_tokens": 32, "ignore_eos": True, **extra} for i in range(ALL)]


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_adaptive_tree import register_acceptance, register_proposer
from vllm_adaptive_tree.proposers import StaticTree

class Own(StaticTree):
    pass

def main():
    method, rule, target, draft, tree, prompts, params = json.load(sys.stdin)
    try:
        register_proposer("own", Own)
    except ValueError as error:
        refused = str(error)
    register_proposer("registered", "fans:Fan")
    register_acceptance("registered", "fans:PLAIN")
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


CHAINS = {"width": 3, "length": 4}


@pytest.mark.parametrize(
    ("method", "rule", "draft", "tree", "nodes"),
    [
        ("fan", "plain", DRAFT, CHAINS, (10, 12)),  # by entry points
        ("registered", "registered", DRAFT, CHAINS, (10, 12)),  # by the functions
        ("opt_tree", "auto", "again", {"period": 6}, (4, 6)),
    ],
)
def test_third_parties_decode_in_a_spawned_engine(
    plain: list[Any],
    method: str,
    rule: str,
    draft: str,
    tree: dict[str, Any],
    nodes: tuple[int, int],
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, script],
        input=json.dumps([method, rule, TARGET, draft, tree, PROMPTS[:ALL], params()]),
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "PYTHONPATH": f"{THIRD_PARTY}:{os.environ.get('PYTHONPATH', '')}",
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


def test_what_cannot_travel_to_the_engine_is_refused() -> None:
    class Local(StaticTree):
        pass

    main = type("Main", (StaticTree,), {"__module__": "__main__"})
    for refused in (Local, main, lambda: None):
        with pytest.raises(ValueError, match="cannot be imported in the engine's processes") as error:
            register_proposer("refused", refused)
        assert '"pkg.module:' in str(error.value)
    for path in ("no.such.module:Class", "vllm_adaptive_tree.proposers:NoSuchClass", "vllm_adaptive_tree"):
        with pytest.raises(ValueError, match="cannot be imported here"):
            register_proposer("refused", path)
    taken = (register_proposer, "dyspec"), (register_acceptance, "rrsw"), (register_acceptance, "auto")
    for register, name in (*taken, (register_drafter, "ngram"), (register_drafter, "eagle3")):
        with pytest.raises(ValueError, match="is built in"):
            register(name, "vllm_adaptive_tree.proposers:StaticTree")
    with pytest.raises(ValueError, match="is no drafter: derive it from"):
        register_drafter("refused", "vllm_adaptive_tree.proposers:StaticTree")


def test_the_guide_shows_this_package() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    assert f"```python\n{(THIRD_PARTY / 'fans' / '__init__.py').read_text()}```" in guide
    points = (THIRD_PARTY / "fans-1.0.dist-info" / "entry_points.txt").read_text()
    shown = guide.split("```toml\n")[1].split("```")[0]
    assert shown.replace('project.entry-points."', "").replace('"', "") == points
