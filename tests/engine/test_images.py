"""Targets that read images: tokens are the same with and without trees."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from tests.engine import heads, images
from tests.engine.engines import DRAFT, PROMPTS, TARGET, V2, Engines, assert_identical, generate, metric
from tests.engine.families import FAMILIES
from tests.engine.known import known
from tests.engine.test_families import Run, begin_anew
from vllm_adaptive_tree.engine.targets import checks

TEXTS: list[list[int]] = [AutoTokenizer.from_pretrained(TARGET).encode(text) for text in PROMPTS]
ASKED = [
    images.prompt(TEXTS[0], 1, TEXTS[1]),
    images.prompt(TEXTS[0], 2, TEXTS[1]),
    images.prompt(TEXTS[2], TEXTS[5], TEXTS[9], 1, TEXTS[3], 3, TEXTS[4]),
    *({"prompt_token_ids": text} for text in TEXTS[5:7]),
]
TOKENS, NODES = (16, 6) if V2 else (40, 12)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
PARAMS = [
    SamplingParams(**{**GREEDY, **more}, logprobs=2)
    for more in ({}, {}, {"temperature": 0.8, "seed": 7}, {}, {"frequency_penalty": 0.5, "presence_penalty": -0.2})
]
ARGUMENTS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, seeing: None) -> Path:
    folder = tmp_path_factory.mktemp("images")
    images.saved(folder / "target")
    return folder


@pytest.fixture(scope="module")
def plain(engines: Engines, folder: Path) -> list[Any]:
    """Whole outputs without trees."""
    begin_anew(engines)
    outputs: list[Any] = engines.start(model=str(folder / "target"), **ARGUMENTS).generate(ASKED, PARAMS)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens[0] != tokens[1], "the images are not seen"
    assert min(len(set(one)) for one in tokens) > 4, "constant texts prove nothing"
    return outputs


def speculation(draft: str, folder: Path, plain: list[Any]) -> dict[str, Any]:
    if draft == "known":
        return known([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in plain], folder, NODES)
    known_as = {"model": DRAFT, "target": str(folder / "target")}
    model = heads.eagle3(folder / "eagle3") if draft == "eagle3" else known_as.get(draft, draft)
    tree = {"budget": None, "cost_profile": None}
    return {"method": "adaptive_tree", "model": model, "num_speculative_tokens": NODES, "tree": tree}


@pytest.mark.parametrize("draft", ["known", "model", "ngram", "eagle3", "target"])
def test_identity(engines: Engines, folder: Path, plain: list[Any], draft: str) -> None:
    """With requests that join, come again from the prefix cache and, with a model, are preempted. A draft that could
    read images too is compiled."""
    expected = [output.outputs[0] for output in plain]
    few = {"num_gpu_blocks_override": 12} if draft == "model" else {}
    few |= {"enforce_eager": False} if draft == "target" and not V2 else {}
    given = {**ARGUMENTS, "max_num_batched_tokens": 64, **few}  # prompts in chunks
    llm = engines.start(speculation(draft, folder, plain), model=str(folder / "target"), **given)
    assert_identical(expected, generate(llm, ASKED, PARAMS))
    hits = metric(llm, "prefix_cache_hits")
    assert_identical(expected, generate(llm, ASKED, PARAMS))
    assert metric(llm, "prefix_cache_hits") > hits
    assert (metric(llm, "num_preemptions") > 0) == (draft == "model")
    assert metric(llm, "spec_decode_num_draft_tokens") > 0
    if draft in ("known", "model", "target"):
        assert metric(llm, "spec_decode_num_accepted_tokens") > TOKENS * len(ASKED) / 3


BENT: list[int] = []
"""Lengths of the prompts whose positions are those of `bent`."""


def bent(model: Any, tokens: list[int], *_: Any, **__: Any) -> tuple[Tensor, int]:
    """Positions in M-RoPE as if the whole prompt were an image: three numbers, and the next is closer than the length
    of the prompt."""
    BENT.append(len(tokens))
    line = torch.arange(len(tokens))
    return torch.stack([line // 2, line // 3, line % 5]), len(tokens) // 2 + 1 - len(tokens)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_m_rope_after_an_image(
    engines: Engines, folder: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where images are, a token's three positions differ, and a tree's nodes are as far from them as from each other.
    These classes' image processors need torchvision, so an image's positions are those of a text here."""
    from vllm.model_executor.models import qwen2_5_vl, qwen3_vl

    for model in (qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, qwen3_vl.Qwen3VLForConditionalGeneration):
        monkeypatch.setattr(model, "get_mrope_input_positions", bent)
    BENT.clear()
    run = Run(engines, FAMILIES[name], tmp_path, dtype="float32")
    assert run.varied, "constant texts prove nothing"
    assert_identical(run.plain, run.trees())
    assert len(BENT) == 2 * len(run.asked)


@pytest.mark.parametrize("attribute", ["_has_oov_mm_tokens", "supports_realtime"])
def test_what_is_refused_once_it_is_loaded(attribute: str) -> None:
    checks.check_images("MODEL", SimpleNamespace())
    with pytest.raises(
        ValueError, match="model: 'MODEL' .* beyond its vocabulary|model: 'MODEL' reads audio with every token"
    ):
        checks.check_images("MODEL", SimpleNamespace(**{attribute: True}))


def test_a_token_of_an_image_beyond_the_vocabulary_is_refused(engines: Engines, seeing: None, tmp_path: Path) -> None:
    model = images.saved(tmp_path / "target", token=2048)
    with pytest.raises(ValueError, match="tokens in place of images that are beyond its vocabulary"):
        engines.start(speculation("ngram", tmp_path, []), model=model, **ARGUMENTS)
    llm = engines.start(speculation("ngram", tmp_path, []), model=model, language_model_only=True, **ARGUMENTS)
    assert len(generate(llm, [ASKED[-1]], PARAMS[-1])[0].token_ids) == TOKENS


def test_images_that_are_read_in_both_directions_are_refused(folder: Path, tmp_path: Path) -> None:
    model = FAMILIES["gemma3-vl"].saved(tmp_path / "model")
    given = {"skip_tokenizer_init": True, "max_model_len": 256, "speculative_config": speculation("ngram", folder, [])}
    with pytest.raises(ValueError, match="reads the tokens of an image in both directions, .* set language_model_only"):
        EngineArgs(model=model, **given).create_engine_config()
    assert EngineArgs(model=model, language_model_only=True, **given).create_engine_config()


def test_a_draft_with_m_rope_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = FAMILIES["qwen3-vl"].saved(tmp_path / "draft")
    target = FAMILIES["qwen3"].saved(tmp_path / "target")
    given = {"method": "adaptive_tree", "model": draft, "num_speculative_tokens": NODES}
    with pytest.raises(ValueError, match="has M-RoPE, whose positions are several numbers, .* a model of text alone"):
        EngineArgs(model=target, skip_tokenizer_init=True, speculative_config=given).create_engine_config()
