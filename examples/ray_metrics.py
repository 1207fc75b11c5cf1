"""What the engines of a Ray cluster say at Ray's metrics endpoints, one on each node."""

import urllib.request
from collections import Counter

import ray
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "ray_vllm_"


def endpoints() -> dict[str, str]:
    """Node's name -> what Prometheus scrapes there."""
    return {
        node["NodeName"]: f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    }


def totals(url: str) -> Counter[str]:
    """vLLM's counters at one endpoint, over all replicas: "spec_decode_num_drafts" and so on."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = Counter[str]()
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith(PREFIX):
            found[sample.name.removeprefix(PREFIX).removesuffix("_total")] += sample.value
    return found
