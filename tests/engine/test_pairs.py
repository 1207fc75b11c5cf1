"""Pairs of other shapes and families than the bundled one, random but not flat: a noisy copy of the target drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Model
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from vllm import LLM, SamplingParams

from tests.engine import heads
from tests.engine.engines import DRAFT, PROMPTS, TARGET, V2, Engines, assert_identical, generate, metric, tree

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = [
    LlamaConfig(**COMMON, num_key_value_heads=4, head_dim=32),
    MistralConfig(**COMMON, num_key_value_heads=1, head_dim=64, sliding_window=None),
    Qwen2Config(**COMMON, num_key_value_heads=2),
    Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=64),
]


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return str(folder)


def random_pair(config: PreTrainedConfig, folder: Path) -> tuple[str, str]:
    torch.manual_seed(0)
    model = Model.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1)
        model.lm_head.weight.normal_(0, 0.35)
    target = save(model, folder / "target")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.add_(torch.randn_like(p) * p.std() * 0.045)
    return target, save(model, folder / "draft")


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_families(config: PreTrainedConfig, tmp_path: Path) -> None:
    target, draft = random_pair(config, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "disable_log_stats": False}
    plain = LLM(target, **common)
    expected = generate(plain, PROMPTS[:4], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2))
    plain.llm_engine.engine_core.shutdown()
    llm = LLM(target, **common, speculative_config={**tree(12, threshold=0), "model": draft})
    assert_identical(expected, generate(llm, PROMPTS[:4], params))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 20
    llm.llm_engine.engine_core.shutdown()


def test_a_draft_of_another_shape_and_shorter_context(engines: Engines, tmp_path: Path) -> None:
    """Its cache has other pages than the target's, and the target outgrows its 128 positions."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=2)
    expected = generate(engines.start(), PROMPTS[:4], params)
    config = LlamaConfig(**{**COMMON, "max_position_embeddings": 128}, num_key_value_heads=1, head_dim=32)
    llm = engines.start(
        {**tree(12), "model": save(Model.from_config(config), tmp_path / "draft"), "max_model_len": 128}
    )
    assert_identical(expected, generate(llm, PROMPTS[:4], params))
    llm = engines.start({**tree(12), "model": DRAFT, "max_model_len": 64})
    assert_identical(expected, generate(llm, PROMPTS[:4], params))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0


def test_a_head_of_a_shorter_context(engines: Engines, tmp_path: Path) -> None:
    """Requests that outgrow it go on without drafts; its positions are the target's."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=2)
    expected = generate(engines.start(), PROMPTS[:4], params)
    draft = heads.eagle3(tmp_path / "draft")
    config = Path(draft) / "config.json"
    drafted = []
    for longest in (512, 64):
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": longest}))
        llm = engines.start({**tree(12), "model": draft})
        assert_identical(expected, generate(llm, PROMPTS[:4], params))
        drafted.append(metric(llm, "spec_decode_num_draft_tokens"))
    assert V2 or drafted[0] > 1.5 * drafted[1] > 0, "V2 drafts to the end"
