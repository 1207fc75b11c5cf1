"""A Ray cluster of two nodes on this machine, for trying what is meant for a real one."""

import contextlib
import os
from collections.abc import Iterator

import ray
from ray.cluster_utils import Cluster

NODES = ("node-1", "node-2")
CPUS = 3  # of each node, as Ray counts them: one replica of an engine asks for two, so a second one has no room there


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """Address of the cluster; it ends with the block."""
    os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")  # so that a short run has figures, too
    cluster = Cluster()
    try:
        for name in NODES:
            cluster.add_node(
                node_name=name,
                num_cpus=CPUS,
                object_store_memory=100_000_000,  # bytes
                include_dashboard=False,
                dashboard_agent_listen_port=0,  # a free one, and not the same in every cluster on this machine
            )
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
