"""Calls of users beside `generate`: beam search, pooling, sleep, resets of the prefix cache, other weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import BeamSearchParams, RequestOutputKind

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
from tests.engine.heads import eagle3

TEXTS, LENGTH = (PROMPTS[:4], 12) if V2 else (PROMPTS, 32)  # the interpreter is slow
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)


@dataclass
class Nothing:
    """To say when a transfer begins."""


@dataclass
class Checkpoint:
    folder: str


class FromFiles(WeightTransferEngine[Nothing, Checkpoint]):
    """The trainer of a test: it has written a checkpoint."""

    init_info_cls, update_info_cls = Nothing, Checkpoint

    def init_transfer_engine(self, init_info: Nothing) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's waits for an accelerator

    def receive_weights(self, update_info: Checkpoint) -> None:
        self.model.load_weights(load_file(f"{update_info.folder}/model.safetensors").items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


if "files" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("files", FromFiles)
TRANSFER: dict[str, Any] = {"weight_transfer_config": WeightTransferConfig(backend="files")}


def greedy(**extra: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, **extra)


def changed(model: str, folder: Path, by: float) -> str:
    """The model with weights of which each is another one by about this part, and a head of its own: a head that is
    tied to the embedding keeps its old weights on a CPU, where vLLM has packed them, with or without trees."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    generator = torch.Generator().manual_seed(0)
    weights = load_file(f"{model}/model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    for name, value in weights.items():
        weights[name] = (value * (1 + by * torch.randn(value.shape, generator=generator))).to(value.dtype)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    return changed(TARGET, tmp_path_factory.mktemp("first") / "target", 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    return changed(TARGET, tmp_path_factory.mktemp("trained") / "target", 0.05)


def beams(llm: Any) -> list[list[tuple[list[int], float]]]:
    found = llm.beam_search([{"prompt": text} for text in TEXTS[:3]], BEAMS)
    return [[(list(one.tokens), one.cum_logprob) for one in output.sequences] for output in found]


@pytest.fixture(scope="module")
def plain(engines: Engines, trained: str) -> dict[str, Any]:
    """Without speculation, of both checkpoints, each in an engine of its own."""
    llm = engines.start()
    found = {"first": generate(llm, TEXTS, greedy(logprobs=2)), "beams": beams(llm)}
    found["trained"] = generate(engines.start(model=trained), TEXTS, greedy(logprobs=2))
    same = sum(a.token_ids == b.token_ids for a, b in zip(found["first"], found["trained"], strict=True))
    assert same < len(TEXTS) / 2
    return found


@pytest.fixture(scope="module")
def llm(engines: Engines, plain: dict[str, Any]) -> Any:
    return engines.start(tree(12, threshold=0.2), **TRANSFER)


def test_beam_search(llm: Any, plain: dict[str, Any]) -> None:
    """It is many requests of one token with logprobs, so no tree is drafted."""
    for ours, theirs in zip(beams(llm), plain["beams"], strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-4)


def test_pooling_is_refused_by_vllm(llm: Any) -> None:
    """An engine that generates does not pool, with or without trees; one that pools has no tree: see
    `test_an_engine_that_pools_is_refused`."""
    before = metric(llm, "prompt_tokens")
    with pytest.raises(ValueError, match="pool|embed"):
        llm.embed(TEXTS[0])
    with pytest.raises(ValueError, match="pool|embed|classify"):
        llm.encode(TEXTS[0], pooling_task="embed")
    assert metric(llm, "prompt_tokens") == before


def interrupted(llm: Any, action: Callable[[], Any]) -> list[Any]:
    """The outputs of requests of which `action` comes in the middle."""
    engine, params, found = llm.llm_engine, greedy(output_kind=RequestOutputKind.FINAL_ONLY), dict[str, Any]()
    for i, text in enumerate(TEXTS):
        engine.add_request(str(i), text, params)
    for step in range(1000):
        if not engine.has_unfinished_requests():
            break
        if step == 4:
            action()
        for output in engine.step():
            found[output.request_id] = output.outputs[0]
    return [found[str(i)] for i in range(len(TEXTS))]


def test_resets_of_the_prefix_cache(llm: Any, plain: dict[str, Any]) -> None:
    """Between requests, and with requests, which are read again."""
    assert_identical(plain["first"], generate(llm, TEXTS, greedy()))
    assert llm.reset_prefix_cache()
    hits = metric(llm, "prefix_cache_hits")
    assert_identical(plain["first"], generate(llm, TEXTS, greedy()))
    assert metric(llm, "prefix_cache_hits") == hits
    preempted = metric(llm, "num_preemptions")
    assert_identical(plain["first"], interrupted(llm, lambda: llm.reset_prefix_cache(reset_running_requests=True)))
    assert metric(llm, "num_preemptions") > preempted


@pytest.mark.parametrize("level", [0, 1])
def test_a_pause(llm: Any, plain: dict[str, Any], level: int) -> None:
    """Sleep mode on a CPU: vLLM pauses its scheduler, from level 1 on forgets the prefix cache, and keeps all
    memory."""

    def sleep() -> None:
        llm.sleep(level=level, mode="keep")
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert not scheduler.schedule().num_scheduled_tokens
        llm.wake_up()

    assert_identical(plain["first"], interrupted(llm, sleep))
    llm.sleep(level=level)
    llm.wake_up()
    assert_identical(plain["first"], generate(llm, TEXTS, greedy()))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0


def test_memory_of_sleep_mode_is_refused_by_vllm(engines: Engines) -> None:
    """On a CPU, with or without trees."""
    for spec in (None, tree(12)):
        with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
            engines.start(spec, enable_sleep_mode=True)


def update(llm: Any, model: str, *, draft: bool = False) -> None:
    """As a trainer does."""
    llm.collective_rpc("start_draft_weight_update" if draft else "start_weight_update")
    llm.collective_rpc("update_weights", args=({"folder": model},))
    llm.collective_rpc("finish_weight_update")
    llm.reset_prefix_cache()


@pytest.mark.parametrize("draft", ["model", "eagle3"])
def test_other_weights(
    engines: Engines, plain: dict[str, Any], first: str, trained: str, draft: str, tmp_path: Path
) -> None:
    """After each change of the target's weights the tokens are those of a fresh engine of that target without
    speculation; a draft keeps its own, and may be given others."""
    own_draft = changed(DRAFT, tmp_path / "own", 0) if draft == "model" else eagle3(tmp_path / "head")
    config = {**tree(12, threshold=0.2), "model": own_draft}
    llm = engines.start(config, model=first, **TRANSFER)
    runner = runner_of(llm)
    drafter = runner.speculator if V2 else runner.drafter
    own = {name: value.clone() for name, value in drafter.model.named_parameters() if "embed" not in name}
    assert_identical(plain["first"], generate(llm, TEXTS, greedy()))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": trained})
    llm.reset_prefix_cache()
    assert_identical(plain["trained"], generate(llm, TEXTS, greedy()))
    update(llm, first)
    assert_identical(plain["first"], generate(llm, TEXTS, greedy()))
    update(llm, trained)
    assert_identical(plain["trained"], generate(llm, TEXTS, greedy()))
    kept = dict(drafter.model.named_parameters())
    assert all(value.equal(kept[name]) for name, value in own.items())
    if draft == "eagle3":
        table = drafter.model.model.embed_tokens.weight
        assert table.data_ptr() == runner.get_model().model.embed_tokens.weight.data_ptr(), "it reads the new one"
        return
    accepted = metric(llm, "spec_decode_num_accepted_tokens")
    update(llm, changed(DRAFT, tmp_path / "draft", 3.0), draft=True)
    assert_identical(plain["trained"], generate(llm, TEXTS, greedy()))
    worse = metric(llm, "spec_decode_num_accepted_tokens") - accepted
    update(llm, own_draft, draft=True)
    assert_identical(plain["trained"], generate(llm, TEXTS, greedy()))
    assert metric(llm, "spec_decode_num_accepted_tokens") - accepted - worse > 2 * worse
