"""An OpenAI server with Ray Serve: replicas with adaptive trees on two nodes, behind one address.

    python examples/ray_serve.py                                # a cluster of two nodes on this machine
    RAY_ADDRESS=HEAD:6379 python examples/ray_serve.py          # a cluster of yours, of CPUs or of GPUs

It serves until it is interrupted. Every node needs vLLM, this package and Ray (`docs/deploy/ray.md`). "Change" says
what another service has to change.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
from local_cluster import two_nodes
from openai import OpenAI
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from ray_metrics import endpoints
from ray_nodes import require_on_every_node

import vllm_adaptive_tree

PAIR = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"
REPLICAS = 2
PORT = int(os.environ.get("PORT", "8000"))
NAME = "demo"  # of the model, for clients

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


def app() -> Any:
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    config = LLMConfig(
        model_loading_config={"model_id": NAME, "model_source": TARGET},
        engine_kwargs={**ENGINE, "speculative_config": SPECULATION},
        runtime_env={"env_vars": ENVIRONMENT},
        # The replica itself takes one more CPU. Without it every replica asks for a GPU.
        placement_group_config={"bundle_per_worker": {"GPU": 1} if gpu else {"CPU": 1}},
        deployment_config={
            "num_replicas": REPLICAS,
            "max_ongoing_requests": 64,  # of one replica; more wait, or go to another one
            # A replica whose engine has died fails what it is sent, until three checks in a row have failed.
            "health_check_period_s": 2,
            "health_check_timeout_s": 10,
        },
    )
    return build_openai_app({"llm_configs": [config]})


def client(url: str) -> OpenAI:
    """Ray Serve sends no request again that has failed inside a replica: clients do."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20)


def main() -> None:
    with contextlib.ExitStack() as stack:
        # Change: leave log_to_driver out to see what the replicas log.
        ray.init(os.environ.get("RAY_ADDRESS") or stack.enter_context(two_nodes()), log_to_driver=False)
        require_on_every_node({"env_vars": ENVIRONMENT})
        start = time.monotonic()
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})  # Change: "0.0.0.0" serves other machines, too.
        stack.callback(serve.shutdown)
        serve.run(app())
        url = f"http://127.0.0.1:{PORT}"
        answer = client(url).completions.create(model=NAME, prompt="import os", max_tokens=16, temperature=0)
        print(f"import os{answer.choices[0].text}")
        for node, metrics in endpoints().items():
            print(f"metrics of {node}: {metrics}")
        print(f"{REPLICAS} replicas serve at {url}/v1, started in {time.monotonic() - start:.0f} s", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler would leave the replicas behind.
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)


if __name__ == "__main__":
    main()
