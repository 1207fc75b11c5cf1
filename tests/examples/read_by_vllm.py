"""Memory of one of several ranks, counted on vLLM's own modules on the meta device: JSON on standard output.

`python -m tests.examples.read_by_vllm TARGET DRAFT RANKS ..`. It runs in a process of its own, set up as one of so many
ranks.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import replace, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype

FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
"""Quantisation config of a checkpoint with FP8 weights and a scale for every output."""


def configured(target: str, draft: str, ranks: int, **overrides: Any) -> Any:
    return EngineArgs(
        model=target,
        speculative_config={"method": "opt_tree", "model": draft, "num_speculative_tokens": 63},
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        max_model_len=16_384,
        skip_tokenizer_init=True,
        hf_overrides=overrides,
    ).create_engine_config()


def of_draft(config: Any) -> Any:
    spec = config.speculative_config
    parts = {"model_config": spec.draft_model_config, "parallel_config": spec.draft_parallel_config}
    return replace(config, **parts, quant_config=None)


def counted(config: Any, prefix: str = "") -> dict[str, int]:
    """Bytes of weights, and of K/V of a token over all layers."""
    before = set(config.compilation_config.static_forward_context)
    with set_current_vllm_config(config), torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(config, prefix=prefix)
    layers = config.compilation_config.static_forward_context
    specs = [layer.get_kv_cache_spec(config) for name, layer in layers.items() if name not in before]
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    return {"layers": len(specs), "weights": weights, "kv": sum(one.page_size_bytes // one.block_size for one in specs)}


def main(target: str, draft: str, *sizes: str) -> dict[str, Any]:
    load_general_plugins()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(configured(target, draft, 1)):
        parallel_state.init_distributed_environment(1, 0, f"file://{Path(folder) / 'store'}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        found = {}
        for size in sizes:
            parallel_state.get_tp_group().world_size = int(size)
            config = configured(target, draft, int(size))
            found[size] = {
                "target": counted(config),
                "draft": counted(of_draft(config), "draft_model"),
                "fp8": counted(configured(target, draft, int(size), quantization_config=FP8)),
            }
    return found


if __name__ == "__main__":
    print("RESULT" + json.dumps(main(*sys.argv[1:])))
