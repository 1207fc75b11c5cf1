"""K/V of the accepted path move to their final slots, before the scheduler can hash the block."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.verification import Verification


def commit(step: Verification, nodes: Tensor, layers: dict[str, Any]) -> None:
    """Write the accepted nodes' keys and values again, through the backend's own packing.

    Args:
        step: the verification whose forward has just run.
        nodes: [requests, D + 1] accepted nodes of every request, -1 behind the path.
        layers: vLLM's static forward context, layer name -> Attention.
    """
    sources, rows = [], []  # place in the saved [R, T]; row whose slot is the final one
    for index, request in enumerate(step.branching):
        width = step.keys[0][0].trees.shape[1]
        for place, node in enumerate(nodes[request].tolist()):
            if node < 0:
                break
            if node != place:  # an accepted prefix of the reveal order stands in its slots already
                sources.append(index * width + 1 + node)
                rows.append(step.row_start[request] + 1 + place)
    if not sources:
        return
    source, row = torch.tensor(sources), torch.tensor(rows)
    for keys, names, slot_mapping in step.keys:
        slots = slot_mapping[row]
        for name in names:
            layer = layers[name]
            key, value = (saved.flatten(0, 1).index_select(0, source) for saved in keys.saved[name])
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
