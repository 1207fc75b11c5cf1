"""KV connectors: blocks that leave vLLM's cache and come back, with what trees have written there."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.engine.engines import (
    DRAFT,
    ENGINE,
    PAIR,
    PROMPTS,
    V2,
    Engines,
    assert_identical,
    generate,
    metric,
    set_costs,
    tree,
)
from tests.engine.offloading import OFFLOADING, PREFILLED
from vllm_adaptive_tree.engine.common.coverage import Coverage

BLOCK: int = ENGINE["block_size"]
COUNT, LENGTH = (4, 16) if V2 else (10, 40)
TEXTS = [prompt * 4 for prompt in PROMPTS[:COUNT]]
FEW = {"num_gpu_blocks_override": 24 if V2 else 40}
"""A cache in which requests displace each other."""
ADAPTIVE = {"method": "adaptive_tree", "num_speculative_tokens": 12}
DRAFTS: dict[str, dict[str, Any]] = {
    "model": {**ADAPTIVE, "model": DRAFT, "tree": {"budget": None}},
    "model, resting at times": {**ADAPTIVE, "model": DRAFT},
    "eagle3": {**ADAPTIVE, "model": str(PAIR / "head"), "tree": {"budget": None}},
    "block": {**ADAPTIVE, "model": str(PAIR / "lattice_head"), "tree": {"budget": None}},
    "ngram": {**ADAPTIVE, "model": "ngram", "tree": {"budget": None}},
}


def params(index: int, **extra: Any) -> SamplingParams:
    """Greedy or seeded, in one batch; `extra`: arguments."""
    sampling: dict[str, Any] = {"temperature": 0.7 * (index % 2), "seed": index, "extra_args": extra or None}
    return SamplingParams(**sampling, max_tokens=LENGTH, ignore_eos=True, logprobs=2)


def forget(llm: Any) -> None:
    """Empty vLLM's own prefix cache; with steps in flight, blocks of the last requests are free after another one."""
    while not llm.reset_prefix_cache():
        generate(llm, ["x"], SamplingParams(max_tokens=1))


def conversation(llm: Any) -> list[Any]:
    """Answers to prompts, and twice to prompts with the answers; the second time vLLM's own cache is empty."""
    asked = [params(index) for index in range(COUNT)]
    first = generate(llm, TEXTS, asked)
    more = [text + answer.text for text, answer in zip(TEXTS, first, strict=True)]
    second = generate(llm, more, asked)
    forget(llm)
    return first + second + generate(llm, more, asked)


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return conversation(engines.start(max_logprobs=2))


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_offloaded_and_loaded(engines: Engines, plain: list[Any], draft: str) -> None:
    """vLLM's own connector for `kv_offloading_size`, which also takes blocks of answers, in a cache that preempts."""
    llm = engines.start(DRAFTS[draft], kv_transfer_config=OFFLOADING, **FEW)
    assert_identical(plain, conversation(llm))
    assert metric(llm, "external_prefix_cache_hits") > 0
    assert metric(llm, "num_preemptions") > 0 or V2


def test_layer_by_layer(engines: Engines, plain: list[Any], tmp_path: Path) -> None:
    """A connector that takes K/V of prompts inside of the attention of each layer, and loads it before a step."""
    given = {"shared_storage_path": str(tmp_path)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": given}
    llm = engines.start(DRAFTS["ngram"], kv_transfer_config=connector)
    assert_identical(plain, conversation(llm))
    assert metric(llm, "external_prefix_cache_hits") > 0


@pytest.mark.skipif(V2, reason="there vLLM itself goes on with tokens of the step that failed")
def test_loads_that_fail(engines: Engines, plain: list[Any], tmp_path: Path) -> None:
    """Their requests are set back, and what the worker has drafted for them with it."""
    connector = {
        "kv_connector": "FailingConnector",
        "kv_connector_module_path": "tests.engine.offloading",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        "kv_load_failure_policy": "recompute",
    }
    llm = engines.start(DRAFTS["ngram"], kv_transfer_config=connector)
    assert_identical(plain, conversation(llm))
    assert metric(llm, "external_prefix_cache_hits") > 0


def test_a_draft_reads_what_was_loaded(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without trees leave prompts that no draft has read, as a prefill instance does. They come back to blocks
    that the draft has read with another text. Of a prompt of whole blocks all is loaded, and the last token computed
    anew."""
    llm = engines.start(tree(8), kv_transfer_config=OFFLOADING, **FEW)
    texts = [{"prompt_token_ids": llm.get_tokenizer().encode(text)[: 2 * BLOCK]} for text in TEXTS[:2]]
    generate(llm, texts, SamplingParams(temperature=0, max_tokens=1, extra_args={"tree": False}))
    for other in TEXTS[2:]:
        forget(llm)
        accepted(llm, [other])
    forget(llm)
    hits, unread = metric(llm, "external_prefix_cache_hits"), list[tuple[int, int]]()
    skipped = Coverage.skipped
    with monkeypatch.context() as patch:
        patch.setattr(
            Coverage, "skipped", lambda self, table, *span: unread.append(span) or skipped(self, table, *span)
        )
        loaded = accepted(llm, texts)
    assert metric(llm, "external_prefix_cache_hits") - hits == 2 * 2 * BLOCK
    assert sum(start == 0 and end >= 2 * BLOCK - 1 for start, end in unread) == 2
    assert loaded == accepted(engines.start(tree(8), **FEW), texts)


def test_a_resting_head_leaves_no_block_unread(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its K/V leaves with that of the target."""
    set_costs(
        monkeypatch, verify={"rows": [1, 1000], "seconds": [1.0, 1.0]}, draft={"rows": [1, 2], "seconds": [99, 99]}
    )
    spec = {**DRAFTS["eagle3"], "tree": {"lookup": None}}
    llm = engines.start(spec, kv_transfer_config=OFFLOADING)
    generate(llm, TEXTS[:2], SamplingParams(temperature=0, max_tokens=2 * BLOCK, ignore_eos=True))
    generate(llm, ["x"], SamplingParams(max_tokens=2))  # stores are late
    assert metric(llm, "spec_decode_num_drafts") == 0
    worker: Any = get_kv_transfer_group()
    worker = worker.connector_worker.worker
    assert len(worker.stored) >= 2 * 2
    for cache, kept in zip(worker.caches.tensors, worker.kept, strict=True):
        for chunk, block in worker.stored.items():
            assert torch.equal(cache.tensor[block], kept[chunk])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="pip install --no-deps nixl nixl-cu12")
@pytest.mark.parametrize("draft", DRAFTS)
def test_prefill_and_decode_apart(
    engines: Engines, plain: list[Any], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances, and NIXL between them."""
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    asked = {
        "speculation": DRAFTS[draft],
        "arguments": {"kv_transfer_config": connector},
        "prompts": TEXTS,
        "params": [{"temperature": 0.7 * (index % 2), "seed": index} for index in range(COUNT)],
    }
    command = [sys.executable, "-m", "tests.engine.prefill", json.dumps(asked)]
    environment = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as prefill:
        assert prefill.stdout is not None
        found = next(line for line in prefill.stdout if line.startswith(PREFILLED))
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700")
        llm = engines.start(DRAFTS[draft], kv_transfer_config=connector)
        wanted = [
            params(index, kv_transfer_params=one) for index, one in enumerate(json.loads(found[len(PREFILLED) :]))
        ]
        outputs = generate(llm, TEXTS, wanted)
        prefill.communicate()
    assert_identical(plain[:COUNT], outputs)
    assert metric(llm, "external_prefix_cache_hits") == sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)


def accepted(llm: Any, prompts: list[Any]) -> float:
    """Number of nodes that greedy answers to prompts have accepted."""
    before = metric(llm, "spec_decode_num_accepted_tokens")
    generate(llm, prompts, SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True))
    return metric(llm, "spec_decode_num_accepted_tokens") - before
