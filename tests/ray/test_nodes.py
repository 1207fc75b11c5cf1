"""A node without the package: one error at start-up that names it, and no engine that starts with something else."""

import json
import subprocess
import sys
from pathlib import Path

from tests.ray.bare_node import environment as bare_environment
from tests.ray.starting import environment

DRIVER = """
import json, sys, time
from pathlib import Path
import ray, ray_data
from ray.cluster_utils import Cluster
from tests.ray.bare_node import joined
from tests.ray.starting import wait_for
from ray_nodes import require_on_every_node

def error(call):
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}

if __name__ == "__main__":
    python, folder = map(Path, sys.argv[1:])
    ray.cloudpickle.register_pickle_by_value(ray_data)  # the example's functions, as those of a script are sent
    cluster = Cluster()
    cluster.add_node(node_name="node-1", num_cpus=0, include_dashboard=False, dashboard_agent_listen_port=0)
    try:
        with joined(cluster.address, python, folder):
            ray.init(cluster.address, log_to_driver=False)
            wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60, "the second node")
            found = {
                "asked": error(require_on_every_node),
                "not asked": error(lambda: ray_data.processor()(ray_data.dataset()).take_all()),
            }
            ray.shutdown()
    finally:
        cluster.shutdown()
    print(json.dumps(found))
"""


def test_a_node_without_the_package(tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "bare")
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    ended = subprocess.run(
        [sys.executable, str(driver), str(python), str(tmp_path)],
        env=environment(),
        cwd=tmp_path,  # Ray has workers import from the driver's folder, too
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    print(found)
    assert found["asked"], "the node has passed"
    assert found["asked"]["kind"] == "RuntimeError"
    assert "bare (" in found["asked"]["message"]
    assert "vllm-adaptive-tree is not installed" in found["asked"]["message"]
    assert "node-1" not in found["asked"]["message"]
    assert found["asked"]["seconds"] < 30
    assert "adaptive_tree" in found["not asked"]["message"]
    assert "SpeculativeConfig" in found["not asked"]["message"]
    assert found["not asked"]["seconds"] < 120
