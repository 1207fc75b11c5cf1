"""Two tensor-parallel ranks, each in a process of its own."""

import json
import os
import subprocess
import sys

from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, TARGET, Engines, assert_identical, generate

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    target, draft, prompts = json.load(sys.stdin)
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=512, tensor_parallel_size=2,
              speculative_config={"method": "opt_tree", "model": draft, "num_speculative_tokens": 25,
                                  "draft_tensor_parallel_size": 2, "tree": {"threshold": "auto"}},
              disable_log_stats=False)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    names = ["spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "adaptive_tree_nodes"]
    counters = [sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}") for name in names]
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in outputs],
                                 [o.outputs[0].text for o in outputs], counters]))

if __name__ == "__main__":
    main()
"""


class Output:
    def __init__(self, token_ids: list[int], text: str):
        self.token_ids, self.text, self.finish_reason = token_ids, text, "length"


def test_two_ranks(engines: Engines, tmp_path: object) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    plain = generate(engines.start(), PROMPTS[:6], params)
    script = f"{tmp_path}/two_ranks.py"
    with open(script, "w") as file:
        file.write(SCRIPT)
    result = subprocess.run(
        [sys.executable, script],
        input=json.dumps([TARGET, DRAFT, PROMPTS[:6]]),
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    tokens, texts, (accepted, drafted, nodes) = json.loads(lines[0].removeprefix("RESULT"))
    assert accepted > 0
    assert nodes == drafted > 0
    assert_identical(plain, [Output(t, text) for t, text in zip(tokens, texts, strict=True)])
