"""Two tensor-parallel ranks, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, TARGET, V2, Engines, assert_identical, generate, tree

ROOT = Path(__file__).parents[2]
COUNT, LENGTH = (3, 16) if V2 else (6, 40)  # requests and their tokens; the interpreter is slow
SCRIPT = """
import json, os, sys
if os.environ.get("MODEL_RUNNER", "v1") != "v1":  # in every rank
    from tests import interpreter
    interpreter.install(asynchronous=os.environ["MODEL_RUNNER"] == "v2-async")
from vllm import LLM, SamplingParams

def main():
    target, spec, prompts, params = json.load(sys.stdin)
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=512, tensor_parallel_size=2,
              speculative_config={**spec, "draft_tensor_parallel_size": 2}, disable_log_stats=False)
    outputs = llm.generate(prompts, [SamplingParams(**own) for own in params], use_tqdm=False)
    names = ["spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "adaptive_tree_nodes"]
    counters = [sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}") for name in names]
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in outputs],
                                 [o.outputs[0].text for o in outputs], counters]))

if __name__ == "__main__":
    main()
"""


SPECS = {
    "opt_tree": tree(25, threshold="auto"),
    "dyspec": {**tree(25), "method": "dyspec", "rejection_sample_method": "rrsw"},
}


def params(method: str, **extra: Any) -> list[dict[str, Any]]:
    """Greedy; beside DySpec every second request is sampled, without a seed."""
    sampled = [method == "dyspec" and i % 2 for i in range(COUNT)]
    return [{"temperature": float(own), "max_tokens": LENGTH, "ignore_eos": True, **extra} for own in sampled]


@pytest.mark.parametrize("method", SPECS)
def test_two_ranks(engines: Engines, tmp_path: object, method: str) -> None:
    asked = params(method)
    plain = generate(engines.start(), PROMPTS[:COUNT], [SamplingParams(**own) for own in params(method, logprobs=2)])
    engines.shutdown()
    script = f"{tmp_path}/two_ranks.py"
    with open(script, "w") as file:
        file.write(SCRIPT)
    result = subprocess.run(
        [sys.executable, script],
        input=json.dumps([TARGET, SPECS[method], PROMPTS[:COUNT], asked]),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        },
        capture_output=True,
        text=True,
        timeout=900 if V2 else 300,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]  # a rank that disagreed would have raised
    tokens, texts, (accepted, drafted, nodes) = json.loads(lines[0].removeprefix("RESULT"))
    assert accepted > 0
    assert (0 < nodes < drafted) if V2 else (nodes == drafted > 0), "V2's figures come two steps late"
    ours = [
        SimpleNamespace(token_ids=own, text=text, finish_reason="length")
        for own, text in zip(tokens, texts, strict=True)
    ]
    assert [len(output.token_ids) for output in ours] == [LENGTH] * COUNT
    greedy = [i for i in range(COUNT) if asked[i]["temperature"] == 0]
    assert_identical([plain[i] for i in greedy], [ours[i] for i in greedy])
