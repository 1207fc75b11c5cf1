"""vLLM's own classes of one-forward heads load the checkpoint and compute what the training computes."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from tests.engine.engines import TARGET
from vllm_adaptive_tree.engine.common.context_norm import norm_each_layer
from vllm_adaptive_tree.heads import checkpoint
from vllm_adaptive_tree.heads.dspark import Block, BlockHead
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Norm

CONFIG: dict[str, Any] = json.loads((Path(TARGET) / "config.json").read_text())
LAYERS, BLOCK, ROOT = (2, 5, 7), Block(layers=2, depth=5, rank=16, mask=0), 9


class Speculative(SimpleNamespace):
    """Fields of a draft in vLLM's config; the rest is not set."""

    def __getattr__(self, name: str) -> None:
        return None


class Dense(nn.Module):
    """An attention layer whose cache holds the context of one request."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer_name, self.scale, self.width = layer.layer_name, layer.impl.scale, layer.head_size
        self.kv_cache, self.impl = None, SimpleNamespace(do_kv_cache_update=self.keep)

    def keep(self, _: Any, key: Tensor, value: Tensor, *rest: Any) -> None:
        self.context = key, value  # [T, heads, D]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.unflatten(-1, (-1, self.width)) for x in (query, key, value))
        key, value = (torch.cat(pair).transpose(0, 1) for pair in zip(self.context, (key, value), strict=True))
        out = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, scale=self.scale, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    config = EngineArgs(TARGET, dtype="float32", enforce_eager=True, max_model_len=64).create_engine_config()
    mine = not parallel_state.model_parallel_is_initialized()
    with set_current_vllm_config(config):
        if mine:
            store = tmp_path_factory.mktemp("group") / "store"
            parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            parallel_state.initialize_model_parallel()
        yield config
    if mine:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("shared", [True, False], ids=["one k_norm", "a k_norm each"])
@pytest.mark.parametrize("cls", [Qwen3DSparkForCausalLM, DFlashQwen3ForCausalLM])
def test_it_computes_the_same(config: VllmConfig, cls: Any, shared: bool, tmp_path: Path) -> None:
    """With one `k_norm` for all layers, as a trained head has it, stock vLLM does."""
    torch.manual_seed(0)
    head = BlockHead(Dimensions.of(CONFIG), len(LAYERS), BLOCK)
    if not shared:
        for layer in head.layers:
            layer.self_attn.k_norm = Norm(head.layers[0].self_attn.size.head_dim, head.layers[0].self_attn.size.eps)
    head.requires_grad_(requires_grad=False)
    for weight in head.parameters():
        weight.copy_(torch.randn_like(weight).mul_(0.2).add_(weight.dim() == 1).bfloat16())
    checkpoint.write_block(tmp_path / "head", head, CONFIG, LAYERS)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    draft = ModelConfig(str(tmp_path / "head"), dtype="float32", skip_tokenizer_init=True)
    config.speculative_config = Speculative(draft_model_config=draft, num_speculative_tokens=BLOCK.depth)
    config.compilation_config.static_forward_context.clear()
    model = cls(vllm_config=config).float()
    dspark = cls is Qwen3DSparkForCausalLM
    model.load_weights((name, weight) for name, weight in weights.items() if dspark or "markov" not in name)
    model.requires_grad_(requires_grad=False)
    assert not any(model.get_draft_attn_causal())
    for layer in model.model.layers:
        layer.self_attn.attn = Dense(layer.self_attn.attn)
    process_weights_after_loading(model, draft, torch.device("cpu"))
    if not shared:
        norm_each_layer(model.model)
    model.model._attn_layers = [layer.self_attn.attn for layer in model.model.layers]

    auxiliary, embedded = torch.randn(ROOT, 3 * CONFIG["hidden_size"]), torch.randn(6, CONFIG["hidden_size"])
    states = model.combine_hidden_states(auxiliary)
    model.precompute_and_store_context_kv(states, torch.arange(ROOT), torch.zeros(ROOT, dtype=torch.int64))
    found = model(torch.zeros(6, dtype=torch.int64), ROOT + torch.arange(6), embedded)
    mine = head(auxiliary[None], embedded[None, None], torch.tensor([ROOT]))[0, 0]
    torch.testing.assert_close(found[1:], mine, atol=1e-3, rtol=1e-3)
    if dspark:
        tokens = torch.tensor([3, 1000])
        bias = model.markov_bias(model.markov_embed(tokens))
        torch.testing.assert_close(bias, head.markov_head(tokens), atol=1e-4, rtol=1e-4)
