"""The examples of `examples/`, as users start them: clusters of two nodes on this machine.

`make test` runs this folder by itself, one test at a time: a cluster keeps both cores busy.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.ray.starting import EXAMPLES, environment

os.environ.update(environment())
sys.path.insert(0, str(EXAMPLES))

STOCK = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    target, engine, prompts = json.loads(sys.argv[1])
    outputs = LLM(target, **engine).generate(prompts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    print(json.dumps({output.prompt: output.outputs[0].text for output in outputs}))
"""


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Greedy text of vLLM without speculation and without plugins, of each of the examples' prompts."""
    import ray_data

    asked = json.dumps([ray_data.TARGET, ray_data.ENGINE, [row["prompt"] for row in ray_data.ROWS]])
    answer = subprocess.run(
        [sys.executable, "-c", STOCK, asked],
        env={**os.environ, **ray_data.ENVIRONMENT, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    found: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    assert len(found) == len(ray_data.ROWS)
    return found
