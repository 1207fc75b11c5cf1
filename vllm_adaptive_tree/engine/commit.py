"""K/V of the accepted path stand in their final slots, before the scheduler can hash the block."""

from typing import Any

from torch import Tensor

from vllm_adaptive_tree.engine.verification import Verification


def commit(step: Verification, nodes: Tensor, layers: dict[str, Any]) -> None:
    """Write the keys and values of accepted nodes again that others overwrote, through the backend's own packing.

    Args:
        step: the verification whose forward has just run.
        nodes: [requests, D + 1] accepted nodes of every request, -1 behind the path.
        layers: vLLM's static forward context, layer name -> Attention.
    """
    homes = {}  # row of an accepted node that was overwritten -> row whose slot is its final one
    for request in step.branching:
        standing = step.standing(request)
        for depth, node in enumerate(nodes[request].tolist(), start=1):
            if node < 0:
                break
            if standing[depth] == node:
                continue
            homes[step.row_of(request, node)] = step.row_start[request] + depth
    if not homes:
        return
    for metadata, names, slot_mapping in step.groups:
        source = [place for place, row in enumerate(metadata.nodes.tolist()) if row in homes]
        slots = slot_mapping[[homes[row] for row in metadata.nodes[source].tolist()]]
        for name in names:
            layer = layers[name]
            key, value = (saved[source] for saved in metadata.saved[name])
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
