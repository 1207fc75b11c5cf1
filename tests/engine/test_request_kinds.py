"""LoRA adapters, prompts of embeddings and logits processors of the user."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.tokenizers import cached_get_tokenizer

from tests.engine.adapters import RANK, adapter
from tests.engine.engines import PROMPTS, TARGET, V2, Engines, assert_identical, generate, metric, runner_of, tree
from tests.engine.heads import dflash, eagle3

TEXTS, TOKENS = (PROMPTS[:9], 16) if V2 else (PROMPTS, 32)  # the interpreter is slow
ADAPTERS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 3,  # one more than are used: vLLM's CPU kernels take a request without one for the last
    "max_lora_rank": RANK,
    "logits_processors": [f"tests.engine.processors:NoRepeat{'V2' if V2 else ''}"],
}
EMBEDDINGS: dict[str, Any] = {"enable_prompt_embeds": True}  # vLLM's own do not go together with adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Of each prompt."""
    folder = tmp_path_factory.mktemp("adapters")
    scale = 0.06 if V2 else 0.02  # of shorter texts each has to change, too
    found = [LoRARequest(f"adapter {i}", i, adapter(folder / str(i), TARGET, seed=i, scale=scale * i)) for i in (1, 2)]
    return [[None, *found][i % 3] for i in range(len(TEXTS))]


def bound(request: int) -> bool:
    """Return whether the logits processor acts on the request."""
    return bool(request // 4 % 2)


def params(*, processed: bool, **extra: Any) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0, "repetition_penalty": 1.2},
    ]
    return [
        SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            seed=i,
            extra_args={"last": 4} if processed and bound(i) else None,
            **kinds[i // 3 % 3],
            **extra,
        )
        for i in range(len(TEXTS))
    ]


def repeats(tokens: Any) -> bool:
    """Return whether a token is one of the four before it."""
    return any(token in tokens[max(0, i - 4) : i] for i, token in enumerate(tokens))


@pytest.fixture(scope="module")
def adapted(engines: Engines, adapters: list[LoRARequest | None]) -> list[Any]:
    """Adapters and processors both change what they are given to, and nothing else."""
    llm = engines.start(**ADAPTERS)
    found = outputs(llm, adapters, logprobs=2)
    without = generate(llm, TEXTS, params(processed=True))
    same = [list(here.token_ids) == list(there.token_ids) for here, there in zip(found, without, strict=True)]
    assert same == [one is None for one in adapters]
    assert any(repeats(one.token_ids) for i, one in enumerate(found) if not bound(i))
    assert not any(repeats(one.token_ids) for i, one in enumerate(found) if bound(i))
    return found


def outputs(llm: Any, adapters: list[LoRARequest | None], **extra: Any) -> list[Any]:
    found = llm.generate(TEXTS, params(processed=True, **extra), lora_request=adapters, use_tqdm=False)
    return [output.outputs[0] for output in found]


@pytest.mark.parametrize("budget", [None, "auto", 7])
def test_adapters_and_processors(
    engines: Engines, adapted: list[Any], adapters: list[LoRARequest | None], budget: str | int | None
) -> None:
    """The draft has no adapter. `auto` runs the target when the engine starts, on rows without one; 7 nodes are of
    unequal trees."""
    llm = engines.start(tree(12, threshold=0.2, budget=budget), **ADAPTERS)
    assert_identical(adapted, outputs(llm, adapters))
    if budget != "auto":
        assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    if V2:  # as its start-up check does
        drafts = metric(llm, "spec_decode_num_drafts")
        runner_of(llm).switch_off()
        assert_identical(adapted, outputs(llm, adapters))
        assert metric(llm, "spec_decode_num_drafts") - drafts <= 2 * len(TEXTS), "of the steps before, counted late"
        assert metric(llm, "adaptive_tree_fallbacks") > 0


@pytest.mark.skipif(V2, reason="vLLM's own Model Runner V2 gives a head the target's embedding without adapters")
@pytest.mark.parametrize("make", [eagle3, dflash])
def test_adapters_and_a_head(
    engines: Engines,
    adapted: list[Any],
    adapters: list[LoRARequest | None],
    make: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    """It has no embedding of its own, and reads other rows than the target's step."""
    config = {"method": "opt_tree", "model": make(tmp_path / "head"), "num_speculative_tokens": 12}
    llm = engines.start({**config, "tree": {"budget": None}}, **ADAPTERS)
    assert_identical(adapted, outputs(llm, adapters))
    assert metric(llm, "spec_decode_num_draft_tokens") > 0


def embedded(llm: Any) -> list[Any]:
    """Every second prompt as embeddings."""
    weights = next(value for name, value in load_file(f"{TARGET}/model.safetensors").items() if "embed_tokens" in name)
    tokens = [llm.get_tokenizer().encode(prompt) for prompt in TEXTS]
    return [
        {"prompt_embeds": weights[torch.tensor(one)].float()} if i % 2 else {"prompt_token_ids": one}
        for i, one in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def own_tokenizer() -> Iterator[None]:
    """vLLM adds a token for embeddings to the tokenizer that the engines of a process share."""
    cached_get_tokenizer.cache_clear()
    yield
    cached_get_tokenizer.cache_clear()


@pytest.fixture(scope="module")
def of_embeddings(own_tokenizer: None, engines: Engines) -> list[Any]:
    llm = engines.start(**EMBEDDINGS)
    return generate(llm, embedded(llm), params(processed=False, logprobs=2))


@pytest.mark.parametrize("draft", ["model", "eagle3", "ngram"])
def test_embeddings(engines: Engines, of_embeddings: list[Any], draft: str, tmp_path: Any) -> None:
    """A draft reads token 0 in their place, and so do penalties, whatever stood in the row of the batch before."""
    config = tree(12, threshold=0.2)
    if draft != "model":
        config["model"] = eagle3(tmp_path / "head") if draft == "eagle3" else draft
    llm = engines.start(config, **EMBEDDINGS)
    generate(llm, TEXTS[::-1], params(processed=False))
    assert_identical(of_embeddings, generate(llm, embedded(llm), params(processed=False)))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.skipif(V2, reason="in the interpreter nothing is compiled")
def test_costs_of_a_model_that_is_compiled_for_embeddings(own_tokenizer: None, engines: Engines) -> None:
    """With prompts as embeddings vLLM compiles no forward of tokens."""
    speculation = {**tree(4, budget="auto"), "model": "ngram"}
    llm = engines.start(speculation, **EMBEDDINGS, enforce_eager=False)
    assert runner_of(llm).budget is not None
    assert generate(llm, PROMPTS[:2], SamplingParams(temperature=0, max_tokens=8))
