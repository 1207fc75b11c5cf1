"""K/V of the accepted path stand in their final slots, before the scheduler can hash the block."""

from typing import Any

from torch import Tensor

from vllm_adaptive_tree.engine.v1.verification import Verification


def commit(step: Verification, nodes: Tensor, layers: dict[str, Any]) -> None:
    """Write the keys and values of accepted nodes again that stood elsewhere, through the backend's own packing.

    Args:
        step: the verification whose forward has just run.
        nodes: [requests, D + 1] accepted nodes of every request, -1 behind the path.
        layers: vLLM's static forward context, layer name -> Attention.
    """
    homes = {}  # row of an accepted node that stood elsewhere -> row whose slot is its final one
    for request in step.branching:
        standing = step.branching[request][0]
        for place, node in enumerate(nodes[request].tolist()):
            if node < 0:
                break
            if standing[place : place + 1] != [node]:
                homes[step.row_of(request, node)] = step.row_start[request] + 1 + place
    if not homes:
        return
    for metadata, names, slot_mapping in step.groups:
        places = {row: place for place, row in enumerate(metadata.written.tolist())}
        source, slots = [places[row] for row in homes], slot_mapping[list(homes.values())]
        for name in names:
            layer = layers[name]
            key, value = (saved[source] for saved in metadata.saved[name])
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
