"""16 bits and vLLM's default compilation: a tree differs from no speculation no more often than vLLM's chain does."""

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, V2, Engines, assert_identical, generate, metric, runner_of, tree
from tests.engine.heads import VOCABULARY, eagle3
from tests.engine.leaning import lean, second_best
from tests.engine.ties import BITS, first_difference, gap, ulp

TEXTS = [text[start : start + 240] for text in topics.values() for start in (0, 600) if len(text) > 900][:100]
CHAINS = {"model": "draft_model", "eagle3": "eagle3"}
"""Kind of the draft -> vLLM's chain."""


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize(
    ("dtype", "draft", "enforce_eager"),
    [
        pytest.param("bfloat16", "model", True, marks=pytest.mark.slow),
        pytest.param("bfloat16", "model", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", "eagle3", False, marks=pytest.mark.skipif(V2, reason="as there")),
        ("float16", "model", True),
    ],
    ids=["eager", "compiled", "head", "float16"],
)
def test_sixteen_bits(
    engines: Engines, dtype: str, draft: str, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head agrees with what is known of the target."""
    assert len(TEXTS) == 100
    model = DRAFT if draft == "model" else eagle3(tmp_path / "head", reduced=True)
    arguments: dict[str, Any] = {"dtype": dtype, "enforce_eager": enforce_eager, "logprobs_mode": "raw_logits"}
    plain = generate(engines.start(**arguments), TEXTS, greedy(64))
    config = {"method": CHAINS[draft], "model": model, "num_speculative_tokens": 5}
    chain = generate(engines.start(config, **arguments), TEXTS, greedy(64))
    llm = engines.start({**tree(12, draft=draft), "model": model}, **arguments)
    if draft != "model":
        prompts = llm.get_tokenizer()(TEXTS).input_ids
        known = [(prompt, output.token_ids) for prompt, output in zip(prompts, plain, strict=True)]
        lean(runner_of(llm), second_best(known, VOCABULARY), monkeypatch.setattr)
    ours = generate(llm, TEXTS, greedy(64))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    chains = sum(first_difference(a, b) is not None for a, b in zip(chain, plain, strict=True))
    differing = [(b, at) for a, b in zip(ours, plain, strict=True) if (at := first_difference(a, b)) is not None]
    print(f"{len(differing)} of 100 differ from no speculation; vLLM's chain: {chains}")
    assert len(differing) <= chains + 2 * math.sqrt(chains + 1)
    for output, at in differing:
        assert gap(output, at, dtype) <= 2, "no near tie"


@pytest.mark.parametrize("dtype", BITS)
def test_ulp(dtype: str) -> None:
    for value in (1.0, 3.7, 11.0, -20.0):
        here = torch.tensor(value, dtype=getattr(torch, dtype))
        above = (here.view(torch.int16) + 1).view(here.dtype)
        assert abs(above.float() - here.float()) == ulp(here.item(), dtype)


def test_float32_compiled(engines: Engines) -> None:
    plain = generate(engines.start(enforce_eager=False), PROMPTS, greedy(40))
    llm = engines.start(tree(12), enforce_eager=False)
    assert_identical(plain, generate(llm, PROMPTS, greedy(40)))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
