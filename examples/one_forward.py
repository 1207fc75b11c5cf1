"""Trees of a head that predicts all depths in one forward: `python examples/one_forward.py [HEAD]`, a head of the
bundled target: P-EAGLE, DFlash, DFlash2, LiLiCorr or DSpark. The checkpoint says which kind of draft it is; the
tree has as many levels as the head predicts, and as many nodes as you ask for."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # right for a model this small
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

import vllm_adaptive_tree

models = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"

if __name__ == "__main__":
    head = sys.argv[1] if len(sys.argv) > 1 else str(models / "lattice_head")
    llm = LLM(
        str(models / "target"),
        speculative_config={"method": "adaptive_tree", "model": head, "num_speculative_tokens": 25},
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
    )
    (output,) = llm.generate("def read_lines(path):\n", SamplingParams(temperature=0, max_tokens=80))
    print(output.prompt + output.outputs[0].text)
