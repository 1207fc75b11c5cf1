"""Generate with adaptive trees on the bundled pair: `python examples/offline.py`."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # right for a model this small
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

import vllm_adaptive_tree

pair = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"

if __name__ == "__main__":
    llm = LLM(
        str(pair / "target"),
        speculative_config={"method": "adaptive_tree", "model": str(pair / "draft"), "num_speculative_tokens": 25},
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
    )
    (output,) = llm.generate("def read_lines(path):\n", SamplingParams(temperature=0, max_tokens=80))
    print(output.prompt + output.outputs[0].text)
