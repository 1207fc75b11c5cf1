"""Trees of what the text has said before, without a draft model: `python examples/look_up.py [ngram | suffix]`.

Made for texts that repeat themselves: edits, agents, JSON. "suffix" also knows the answers to past requests, and needs
`pip install --find-links dist 'vllm-adaptive-tree[suffix]'`.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # right for a model this small
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

import vllm_adaptive_tree

TARGET = str(Path(vllm_adaptive_tree.__file__).parent / "demo_pair" / "target")
PROMPT = """RED = Colour("red", 255, 0, 0)
GREEN = Colour("green", 0, 255, 0)
BLUE = Colour("blue", 0, 0, 255)
"""

if __name__ == "__main__":
    llm = LLM(
        TARGET,
        speculative_config={
            "method": "adaptive_tree",
            "model": (sys.argv[1:] or ["ngram"])[0],
            "num_speculative_tokens": 16,
        },
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
    )
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=80))
    print(output.prompt + output.outputs[0].text)
