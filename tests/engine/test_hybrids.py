"""Targets with recurrent states: their trees are chains of adaptive length, with the texts of vLLM's own chains."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import V2, Engines, assert_identical, generate, metric, runner_of
from tests.engine.families import FAMILIES, Family
from tests.engine.known import known
from tests.engine.test_families import NODES, PARAMS, TOKENS, Run, prompts, without_weights
from tests.engine.ties import first_difference, gap
from vllm_adaptive_tree.engine.v1.startup_costs import target_forward
from vllm_adaptive_tree.versions import minor

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-text", "qwen3.5-moe")]
HYBRIDS = ["qwen3-next", "qwen3.5", *SLOW]
CHAIN = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
OLD = minor(vllm.__version__) == "0.32"
CLOSE = 12
"""As in `test_families.py`, and states pass on what differs: vLLM reads prompts and single tokens by other kernels than
its own chains. A state of another token is 20 to 60 apart."""

served = pytest.mark.skipif(OLD, reason="served on vLLM 0.33: `python -m tests.next`")


def assert_close(outputs: list[Any], others: list[Any]) -> None:
    for one, other in zip(outputs, others, strict=True):
        at = first_difference(one, other)
        assert at is None or gap(other, at, "bfloat16") <= CLOSE


def assert_same(chain: list[Any], ours: list[Any]) -> None:
    """With AMX vLLM convolves chains by one kernel if all are the longest, and by another if not."""
    if torch.cpu._is_amx_tile_supported():
        assert_close(ours, chain)
    else:
        assert_identical(chain, ours)


def config(tmp_path: Path, speculation: dict[str, Any], **arguments: Any) -> Any:
    family = FAMILIES["qwen3-next"]
    model = without_weights(family.config, tmp_path, **{**family.fields, "architectures": ["Qwen3NextForCausalLM"]})
    given = {"skip_tokenizer_init": True, "max_model_len": 256, "dtype": "bfloat16", **arguments}
    return EngineArgs(model=model, speculative_config=speculation, **given).create_engine_config()


@pytest.mark.skipif(not OLD, reason="a fault of vLLM 0.32")
def test_the_release_that_loses_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"after a shorter one .* install vLLM 0\.33"):
        config(tmp_path, known([], tmp_path, NODES, chains=True))


@served
def test_methods_that_branch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'opt_tree' drafts branches, .* use 'adaptive_tree'"):
        config(tmp_path, known([], tmp_path, NODES))


@served
def test_prefixes_are_cached_only_if_asked_for_and_then_refused(tmp_path: Path) -> None:
    draft = known([], tmp_path, NODES, chains=True)
    assert not config(tmp_path, draft).cache_config.enable_prefix_caching
    with pytest.raises(ValueError, match="enable_prefix_caching .* set it to False"):
        config(tmp_path, draft, enable_prefix_caching=True)


@pytest.fixture(scope="module", params=HYBRIDS)
def run(request: Any, engines: Engines, seeing: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(engines, FAMILIES[request.param], tmp_path_factory.mktemp("hybrid"), logprobs_mode="raw_logits")


@pytest.fixture(scope="module")
def chain(run: Run) -> list[Any]:
    """Outputs with vLLM's own chain."""
    return generate(run.engines.start(CHAIN, **run.arguments), run.asked, PARAMS)


def test_a_hybrid_is_no_draft(tmp_path: Path) -> None:
    """vLLM takes Qwen's for their MTP modules."""
    draft = without_weights("JambaConfig", tmp_path / "draft", architectures=["JambaForCausalLM"], vocab_size=512)
    target = without_weights("LlamaConfig", tmp_path / "target", architectures=["LlamaForCausalLM"], vocab_size=512)
    speculation = {"method": "adaptive_tree", "model": draft, "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match="keeps a recurrent state, .* take a draft of attention alone"):
        EngineArgs(target, speculative_config=speculation, skip_tokenizer_init=True).create_engine_config()


@served
def test_texts_are_those_of_a_chain(run: Run, chain: list[Any]) -> None:
    known_texts = [[*one["prompt_token_ids"], *other.token_ids] for one, other in zip(run.asked, chain, strict=True)]
    llm = run.engines.start(known(known_texts, run.folder, NODES, chains=True), **run.arguments)
    names = "spec_decode_num_drafts", "spec_decode_num_draft_tokens"
    before = [metric(llm, name) for name in names]
    assert_same(chain, run.again(llm))
    steps, drafted = (metric(llm, name) - start for name, start in zip(names, before, strict=True))
    assert 0 < drafted < steps * NODES, "chains of one length prove nothing"
    assert_same(chain, [generate(llm, [prompt], PARAMS)[0] for prompt in run.asked])
    assert_close(chain, run.plain)
    if not V2:
        with torch.no_grad():
            logits = target_forward(runner_of(llm), 20)()  # of two chains
        assert len(logits.unique(dim=0)) == 20


def lose_the_state(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step goes on from the state after the root."""
    if V2:
        states = runner.model_state
        after = states.postprocess_state
        monkeypatch.setattr(states, "postprocess_state", lambda rows, *_: after(rows, 1))
        return
    update = runner._update_states_after_model_execute

    def early(tokens: Any, scheduled: Any) -> None:
        update(tokens, scheduled)
        runner.input_batch.num_accepted_tokens_cpu_tensor[: len(tokens)] = 1

    monkeypatch.setattr(runner, "_update_states_after_model_execute", early)


@served
def test_the_state_of_an_earlier_token_shows(run: Run, chain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the state after the last accepted token is the one that the next step goes on from."""
    llm = run.engines.start(known(run.texts(), run.folder, NODES, chains=True), **run.arguments)
    lose_the_state(runner_of(llm), monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(chain, generate(llm, run.asked, PARAMS))


@served
@pytest.mark.skipif(not V2, reason="a check of Model Runner V2")
def test_the_start_up_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads chains, and the sequences beside them token by token, as recurrent layers do."""
    from vllm_adaptive_tree.engine.self_check.check import check

    llm = run.engines.start(known(run.texts(), run.folder, NODES, chains=True), **run.arguments)
    found = check(runner_of(llm))
    assert found.passed, str(found)
    lose_the_state(runner_of(llm), monkeypatch)
    assert check(runner_of(llm)).failed == ["decoding"]


@served
@pytest.mark.slow
@pytest.mark.parametrize("budget", ["auto", 5, None])
def test_a_draft_with_a_look_up(run: Run, chain: list[Any], budget: str | int | None) -> None:
    """With 5 nodes in a batch its requests verify chains of several lengths, on V2 of those that the device chooses."""
    draft = replace(FAMILIES["llama"], fields={"head_dim": 64, "num_hidden_layers": 1}).saved(run.folder / "draft")
    speculation = {"method": "adaptive_tree", "model": draft, "num_speculative_tokens": 6, "tree": {"budget": budget}}
    llm = run.engines.start(speculation, **run.arguments)
    assert_same(chain, generate(llm, run.asked, PARAMS))
    more = prompts([150, 17, 3, 60, 61, 62, 63, 64, 65], run.family.built().vocab_size, seed=1)
    assert len(generate(llm, more, PARAMS)[0].token_ids) == TOKENS


def with_module(model: str, family: Family, folder: Path) -> str:
    """The checkpoint with an MTP module of the weights of its last layer. As in Qwen3-Next's own, no key of that config
    says so."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    text = "model.language_model." if family.sees else "model."
    last, norm = f"{text}layers.{family.built().num_hidden_layers - 1}.", weights[f"{text}norm.weight"]
    module = {f"layers.0.{name.removeprefix(last)}": one for name, one in weights.items() if name.startswith(last)}
    module |= dict.fromkeys(("norm.weight", "pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight"), norm)
    module["fc.weight"] = torch.eye(len(norm), dtype=norm.dtype).repeat(1, 2) / 2
    weights |= {f"mtp.{name}": one.clone() for name, one in module.items()}
    save_file(weights, folder / "model.safetensors")
    return str(folder)


@served
@pytest.mark.parametrize("budget", ["auto", 5, pytest.param(None, marks=pytest.mark.slow)])
def test_the_target_s_own_module(run: Run, chain: list[Any], budget: str | int | None) -> None:
    """With costs of the start, by which it may rest, and without; once compiled, as is vLLM's default."""
    target = with_module(run.arguments["model"], run.family, run.folder / f"target, {budget}")
    tree = {"draft": "mtp", "budget": budget, "lookup": None}
    speculation = {"method": "adaptive_tree", "model": target, "num_speculative_tokens": 4, "tree": tree}
    eager = V2 or budget != 5
    llm = run.engines.start(speculation, **{**run.arguments, "model": target, "enforce_eager": eager})
    (assert_same if eager else assert_close)(chain, generate(llm, run.asked, PARAMS))
    assert budget == "auto" or metric(llm, "spec_decode_num_draft_tokens") > 20
