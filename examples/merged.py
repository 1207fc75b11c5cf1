"""A draft model's trees with what the text has said before merged into them: `python examples/merged.py`.

The continuations cost no forward of the draft, and share the node budget with its own tokens.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # right for a model this small
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

import vllm_adaptive_tree

models = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"

if __name__ == "__main__":
    llm = LLM(
        str(models / "target"),
        speculative_config={
            "method": "adaptive_tree",
            "model": str(models / "draft"),
            "num_speculative_tokens": 16,
            "tree": {"lookup": "ngram"},  # or "suffix"
        },
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
    )
    (output,) = llm.generate("class Stack:\n    def push(self, item):\n", SamplingParams(temperature=0, max_tokens=80))
    print(output.prompt + output.outputs[0].text)
