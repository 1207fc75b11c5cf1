"""Pairs of other shapes and families than the bundled one, random but not flat: a noisy copy of the target drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Model
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from vllm import SamplingParams

from tests.engine import heads
from tests.engine.engines import (
    DRAFT,
    PROMPTS,
    TARGET,
    V2,
    Engines,
    assert_identical,
    generate,
    metric,
    runner_of,
    tree,
)

LIMIT, LENGTH = 48, 60 if V2 else 120
"""Tokens that a draft reads; of an output."""
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
def test_families(engines: Engines, config: PreTrainedConfig, tmp_path: Path) -> None:
    target, draft = random_pair(config, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    expected = generate(engines.start(model=target), PROMPTS[:4], params)
    llm = engines.start({**tree(12, threshold=0), "model": draft}, model=target)
    assert_identical(expected, generate(llm, PROMPTS[:4], params))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 20


def test_a_draft_of_another_shape_and_shorter_context(engines: Engines, tmp_path: Path) -> None:
    """Its cache has other pages than the target's, which outgrows its positions."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    expected = generate(engines.start(), PROMPTS[:4], params)
    config = LlamaConfig(**{**COMMON, "max_position_embeddings": LIMIT}, num_key_value_heads=1, head_dim=32)
    llm = engines.start(
        {**tree(12), "model": save(Model.from_config(config), tmp_path / "draft"), "max_model_len": LIMIT}
    )
    assert_identical(expected, generate(llm, PROMPTS[:4], params))


OUTGROWING = [PROMPTS[0] * 4, PROMPTS[2], PROMPTS[9]]
"""One prompt is longer than what the draft reads; a short request drafts beside it to its end."""
ENDS = [SamplingParams(temperature=0, max_tokens=one, ignore_eos=True, logprobs=2) for one in (20, LENGTH, 20)]


@pytest.fixture(scope="module")
def outgrown(engines: Engines) -> list[Any]:
    """The outputs without speculation."""
    return generate(engines.start(), OUTGROWING, ENDS)


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_requests_that_outgrow_the_draft_go_on_without(
    engines: Engines, outgrown: list[Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = DRAFT if kind == "model" else heads.eagle3(tmp_path / "draft")
    llm = engines.start({**tree(6), "model": draft, "max_model_len": LIMIT})
    runner, positions, roots = runner_of(llm), list[int](), list[int]()

    def read(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions.extend(kwargs["positions"].tolist())

    def sample(*args: Any) -> Any:
        step = runner.step.verification
        if step is not None:
            roots.extend(step.root[step.tree.valid.any(1)].tolist() if V2 else [step.computed[at] for at in step.trees])
        return original(*args)

    (runner.speculator if V2 else runner.drafter).model.register_forward_pre_hook(read, with_kwargs=True)
    name = "sample" if V2 else "_sample"
    original = getattr(runner, name)
    monkeypatch.setattr(runner, name, sample)
    assert_identical(outgrown, generate(llm, OUTGROWING, ENDS))
    assert LIMIT - 8 < max(roots) < LIMIT - 1
    assert kind != "model" or max(positions) < LIMIT, "the positions of heads are the target's"
