"""Targets of multi-head latent attention, on Model Runner V2: texts, prompts beside trees, the start-up check."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import V2, Engines, assert_identical, generate, metric, runner_of
from tests.engine.families import FAMILIES
from tests.engine.known import known
from tests.engine.latent import with_module
from tests.engine.test_families import PARAMS, TOKENS, Run, without_weights
from vllm_adaptive_tree.attention import triton_tree
from vllm_adaptive_tree.engine.preview import Arguments, preview
from vllm_adaptive_tree.engine.targets.checks import attention_layers
from vllm_adaptive_tree.engine.v2 import latent, latent_batch

NODES = 6
LENGTHS = [29, 62, 1 + NODES, 40, 33]  # one is as long as a tree
on_v2 = pytest.mark.skipif(not V2, reason="MODEL_RUNNER=v2")


@pytest.fixture(scope="module")
def run(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two requests at a time, so that prompts are read beside trees."""
    folder = tmp_path_factory.mktemp("latent")
    return Run(engines, FAMILIES["deepseek-v3"], folder, LENGTHS, dtype="float32", max_num_seqs=2)


def unequal(run: Run) -> list[Any]:
    """Parameters with which requests end one after the other."""
    params = [PARAMS.clone() for _ in run.asked]
    for number, one in enumerate(params):
        one.max_tokens = TOKENS - 3 * number
    return params


@on_v2
def test_prompts_beside_trees(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to vLLM, by metadata of their own."""
    left, others = [], latent_batch.LatentBuilder.others

    def seen(builder: Any, count: int, rows: int) -> Any:
        left.append(others(builder, count, rows))
        return left[-1]

    monkeypatch.setattr(latent_batch.LatentBuilder, "others", seen)
    llm = run.engines.start(known(run.texts(), run.folder, NODES), **run.arguments)
    for plain, ours in zip(run.plain, generate(llm, run.asked, unequal(run)), strict=True):
        assert ours.token_ids == plain.token_ids[: len(ours.token_ids)]
    assert any(one is None for one in left)
    assert {(one.metadata.num_decodes, one.metadata.num_prefills) for one in left if one is not None} == {(0, 1)}


@on_v2
@pytest.mark.parametrize("budget", [5, "auto", pytest.param(None, marks=pytest.mark.slow)])
def test_the_target_s_own_module(run: Run, budget: str | int | None) -> None:
    """Its layer, too, is of latents. With 5 nodes in a batch the device chooses which are verified."""
    target = with_module(run.arguments["model"], run.folder / f"target, {budget}")
    tree = {"draft": "mtp", "budget": budget} | ({"threshold": 0} if budget != "auto" else {})
    speculation = {"method": "opt_tree", "model": target, "num_speculative_tokens": NODES, "tree": tree}
    llm = run.engines.start(speculation, **{**run.arguments, "model": target})
    assert_identical(run.plain, generate(llm, run.asked, PARAMS))
    assert budget == "auto" or metric(llm, "spec_decode_num_draft_tokens") > 20
    foreseen = preview(speculation, Arguments(target, dtype="float32"))["memory"]
    assert foreseen["kv_per_token"] == runner_of(llm).draft_memory.kv
    layers = attention_layers(runner_of(llm).vllm_config)
    assert len(layers) == 1 + FAMILIES["deepseek-v3"].built().num_hidden_layers
    assert all(isinstance(one.impl, latent.LatentAttention) for one in layers.values())


class Roots:
    """Hidden states of a module's roots from now on, by request, in the order of the requests, and position."""

    def __init__(self, speculator: Any, monkeypatch: pytest.MonkeyPatch):
        self.found: dict[tuple[int, int], torch.Tensor] = {}
        self.beside_prompts: set[tuple[int, int]] = set()
        self.speculator, self.read_to, self.roots_of = speculator, speculator.read, speculator.roots
        monkeypatch.setattr(speculator, "read", self.read)
        monkeypatch.setattr(speculator, "roots", self.roots)

    def read(self, target: Any) -> None:
        self.names, self.prompts = target.batch.req_ids, target.batch.has_prefill
        self.read_to(target)

    def roots(self, requests: int) -> Any:
        for row, name in enumerate(self.names):
            key = int(name.split("-")[0]), int(self.speculator.inputs.position[row])
            self.found[key] = self.speculator.root_hidden[row].clone()
            self.beside_prompts |= {key} if self.prompts else set()
        return self.roots_of(requests)


@on_v2
def test_what_a_module_has_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots after trees, also beside prompts, are those of the same text read as a prompt."""
    target = with_module(run.arguments["model"], run.folder / "target, roots")
    tree = {"draft": "mtp", "budget": 5, "threshold": 0}
    speculation = {"method": "opt_tree", "model": target, "num_speculative_tokens": NODES, "tree": tree}
    llm = run.engines.start(speculation, **{**run.arguments, "model": target})
    roots = Roots(runner_of(llm).speculator, monkeypatch)
    generate(llm, run.asked, unequal(run))
    after, texts = dict(roots.found), run.texts()
    decoded = [key for key in after if key[1] > len(run.asked[key[0]]["prompt_token_ids"])]
    beside = [key for key in decoded if key in roots.beside_prompts]
    keys = [*beside, *decoded[::8]]
    roots.found.clear()
    brief = PARAMS.clone()
    brief.max_tokens = 2
    generate(llm, [{"prompt_token_ids": texts[request][:position]} for request, position in keys], brief)
    first = min(request for request, _ in roots.found)
    assert len(beside) > 1
    for number, (request, position) in enumerate(keys):
        read = roots.found[first + number, position]
        assert torch.allclose(after[request, position], read, atol=1e-4 * float(read.abs().max())), (request, position)


@on_v2
def test_the_start_up_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_adaptive_tree.engine.self_check.check import check

    llm = run.engines.start(known(run.texts(), run.folder, NODES), **run.arguments)
    found = check(runner_of(llm))
    assert found.passed, str(found)
    if runner_of(llm).attention.buffers is None:
        monkeypatch.setattr(latent.LatentAttention, "write", lambda *_: None)
        assert {"commit", "decoding"} <= {*check(runner_of(llm)).failed}


@on_v2
def test_a_tree_read_as_a_chain_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a row sees its ancestors alone."""
    from vllm_adaptive_tree.engine.v2 import attention

    dense, kernel = attention.attend, triton_tree.tree_attention

    def everything(query: Any, key: Any, value: Any, bias: Any, *rest: Any, **more: Any) -> Any:
        return dense(query, key, value, bias.nan_to_num(neginf=0.0), *rest, **more)

    def all_bits(*inputs: Any, **more: Any) -> Any:
        return kernel(*inputs[:6], inputs[6] | 0x7FFF, *inputs[7:], **more)

    monkeypatch.setattr(attention, "attend", everything)
    monkeypatch.setattr(triton_tree, "tree_attention", all_bits)
    with pytest.raises(AssertionError):
        assert_identical(run.plain, run.trees())


@on_v2
def test_a_draft_model_of_latents_is_refused(tmp_path: Path) -> None:
    sizes = {"architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 512}
    draft = without_weights("DeepseekV2Config", tmp_path / "draft", **sizes)
    target = without_weights("DeepseekV2Config", tmp_path / "target", **sizes)
    speculation = {"method": "adaptive_tree", "model": draft, "num_speculative_tokens": NODES}
    with pytest.raises(ValueError, match="has multi-head latent attention, .* take one with other attention"):
        EngineArgs(target, speculative_config=speculation, skip_tokenizer_init=True).create_engine_config()


@pytest.mark.skipif(V2, reason="of Model Runner V1")
def test_model_runner_v1_is_refused(tmp_path: Path) -> None:
    target = without_weights("DeepseekV3Config", tmp_path, architectures=["DeepseekV3ForCausalLM"])
    speculation = {"method": "adaptive_tree", "model": "ngram", "num_speculative_tokens": NODES}
    with pytest.raises(ValueError, match="has multi-head latent attention, .* set VLLM_USE_V2_MODEL_RUNNER=1"):
        EngineArgs(target, speculative_config=speculation, skip_tokenizer_init=True).create_engine_config()
