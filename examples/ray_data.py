"""Batch inference with Ray Data: replicas with adaptive trees, one on each of two nodes.

    python examples/ray_data.py [ROWS.jsonl]                    # a cluster of two nodes on this machine
    RAY_ADDRESS=HEAD:6379 python examples/ray_data.py           # a cluster of yours, of CPUs or of GPUs

Every node needs vLLM, this package and Ray (`docs/deploy/ray.md`). "Change" says what another job has to change.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from local_cluster import two_nodes
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from ray_metrics import endpoints, totals
from ray_nodes import require_on_every_node

import vllm_adaptive_tree

PAIR = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"
REPLICAS = 2

# Change: names on a model hub, or folders that every node has at this path.
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")

SPECULATION = {
    "method": "adaptive_tree",
    "model": DRAFT,
    "num_speculative_tokens": 12,
    # Change: leave "tree" out. Then nodes are drafted as far as they pay, which is not far beside a target this small.
    "tree": {"budget": None},
}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}  # Change: {} is right for most models.

# Change: what your engines need. What is set here reaches every process of a replica; a shell's variables do not.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # right for a model this small
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines on one machine would choose the same cores
    **{name: value for name, value in os.environ.items() if name.startswith(("HF_", "VLLM_"))},
}


VERBS = ("read", "write", "parse", "format", "open", "find", "load", "split")
NOUNS = ("line", "file", "name", "value", "header", "path", "date", "token")
ROWS = [{"prompt": f"def {verb}_{noun}(source):\n"} for verb in VERBS for noun in NOUNS]


def dataset() -> Any:
    """Change: `ray.data.read_parquet(..)`, or what else Ray Data reads. A row needs a "prompt"."""
    return ray.data.from_items(ROWS, override_num_blocks=8)


def processor() -> Any:
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    config = vLLMEngineProcessorConfig(
        model_source=TARGET,
        engine_kwargs={**ENGINE, "speculative_config": SPECULATION},
        runtime_env={"env_vars": ENVIRONMENT},
        # From, to. A single number means "from one": then more start when there is work for them, and two may be one.
        concurrency=(REPLICAS, REPLICAS),
        # Without it every replica asks for a GPU. Two CPUs: the replica and its engine are two processes.
        placement_group_config={"bundle_per_worker": {"GPU": 1, "CPU": 2} if gpu else {"CPU": 2}},
        batch_size=8,  # Change: 32 or more. A batch is what is done again where a replica is lost.
        # Pools of processes of their own, where they are asked for; vLLM tokenizes, too. Change: True for chats.
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    return build_processor(
        config,
        preprocess=lambda row: {**row, "sampling_params": {"temperature": 0, "max_tokens": 48}},
        postprocess=lambda row: {name: row[name] for name in row if name in ("id", "prompt", "generated_text")},
    )


def main() -> None:
    with contextlib.ExitStack() as stack:
        # Change: leave log_to_driver out to see what the replicas log.
        ray.init(os.environ.get("RAY_ADDRESS") or stack.enter_context(two_nodes()), log_to_driver=False)
        require_on_every_node({"env_vars": ENVIRONMENT})
        # Change: leave it out. With rows this few, the first replica to be up would take all of them.
        ray.data.DataContext.get_current().wait_for_min_actors_s = 600
        start = time.monotonic()
        rows = processor()(dataset()).take_all()
        seconds = time.monotonic() - start
        for row in rows[:2]:
            print(row["prompt"] + row["generated_text"], end="\n---\n")
        print(f"{len(rows)} rows in {seconds:.0f} s, the start of {REPLICAS} replicas included")
        for node, url in endpoints().items():
            found = totals(url)
            drafts, accepted = found["spec_decode_num_drafts"], found["spec_decode_num_accepted_tokens"]
            print(f"{node}: {1 + accepted / max(1, drafts):.2f} tokens per step, {drafts:.0f} steps")
    for name in sys.argv[1:]:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
