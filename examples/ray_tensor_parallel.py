"""One engine with adaptive trees over several machines of a Ray cluster, a tensor-parallel rank on every GPU.

    ray start --head                                  # on the first machine
    ray start --address FIRST:6379                    # on every other one
    python examples/ray_tensor_parallel.py TARGET DRAFT --tensor-parallel-size 16    # on the first

Every machine needs the same vLLM and the same vllm-adaptive-tree, and both models under the same name. Where one has
something else, the engine ends at start-up with an error that names it. GPUs are untested (docs/gpu.md). On
CPUs vLLM's Ray executor refuses to run; `tests/ray` runs this file there with an executor for tests.
"""

import argparse
import json

from vllm import LLM, SamplingParams

PROMPTS = ["def read_lines(path):\n", "class Counter(dict):\n", "import os\nimport sys\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=25, help="the most tree nodes per request and step")
    parser.add_argument("--engine", type=json.loads, default={}, help="whatever else LLM takes, as a JSON object")
    asked = parser.parse_args()
    llm = LLM(
        asked.target,
        speculative_config={"method": "adaptive_tree", "model": asked.draft, "num_speculative_tokens": asked.nodes},
        disable_log_stats=False,
        tensor_parallel_size=asked.tensor_parallel_size,
        **{"distributed_executor_backend": "ray", **asked.engine},
    )
    for rank, found in enumerate(llm.collective_rpc("installation")):
        print(f"rank {rank}: {found['node']}, vllm-adaptive-tree {found['vllm-adaptive-tree']}, vLLM {found['vllm']}")
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64)):
        print(output.prompt + output.outputs[0].text, end="\n\n")
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafts, accepted = (counted[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    print(f"tokens per step: {1 + accepted / max(drafts, 1):.2f}")


if __name__ == "__main__":
    main()
