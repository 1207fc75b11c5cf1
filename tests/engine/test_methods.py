"""Every method and every rule in the engine: what is greedy or seeded stays that of vLLM without speculation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import DRAFT, PROMPTS, V2, Engines, TreeSpy, assert_identical, generate, metric, runner_of
from vllm_adaptive_tree.proposers.gate import Gate

BATCH, NODES = PROMPTS[:4], 10 if V2 else 20  # the interpreter is slow

# name -> method, options, what `auto` takes
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "adaptive_tree": ("adaptive_tree", {}, "traversal"),
    "opt_tree": ("opt_tree", {}, "target_only"),
    "dyspec threshold": ("dyspec", {}, "traversal"),
    "dyspec heap": ("dyspec", {"mode": "heap"}, "traversal"),
    "c2t tree": ("c2t", {"gate": "c2t.safetensors"}, "target_only"),
    "c2t chain": ("c2t", {"gate": "c2t.safetensors", "mode": "chain"}, "target_only"),
    "eagle2": ("eagle2", {"top_k": 4}, "target_only"),
    "static_tree eagle1": ("static_tree", {"shape": "eagle1"}, "traversal"),
    "static_tree k-config": ("static_tree", {"shape": [3, 2, 1, 1]}, "traversal"),
    "sequoia": ("sequoia", {"vector": "vector.json"}, "traversal"),
    "mcsd": ("mcsd", {}, "traversal"),
    "mcsd stop 1": ("mcsd", {"stop": "type1", "gate": "hidden.safetensors", "shape": [4, 1, 1, 1]}, "traversal"),
    "mcsd stop 2": ("mcsd", {"stop": "type2", "gate": "mcsd.safetensors", "shape": [4, 1, 1, 1]}, "traversal"),
}
RULES: dict[str, tuple[str, dict[str, Any], str]] = {
    "target_only": ("dyspec", {"mode": "heap"}, "without_replacement"),
    "rrs": ("static_tree", {"shape": "ternary"}, "iid"),
    "k_seq": ("mcsd", {}, "iid"),
    "spechub": ("static_tree", {"shape": "binary"}, "hub_pair"),
    "greedy_multi_draft": ("static_tree", {"shape": [3, 2, 2]}, "top_k_plus_one"),
}

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "min_p": {"min_p": 0.1, "top_k": 20},
    "logit_bias": {"logit_bias": {262: 12.0, 300: -100.0, 201: -100.0}},
    "min_tokens": {"min_tokens": 17, "ignore_eos": False, "stop_token_ids": list(range(260, 380))},
    "bad_words": {"bad_words": ["the", " self", "import"]},
    "stop": {"stop": ["e", "self"], "min_tokens": 3},
}
CALL = r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"


def spec(folder: Path, method: str, options: dict[str, Any], rule: str = "auto") -> dict[str, Any]:
    options = {key: str(folder / value) if key in ("gate", "vector") else value for key, value in options.items()}
    sizes = {"model": DRAFT, "num_speculative_tokens": NODES}
    return {"method": method, **sizes, "rejection_sample_method": rule, "tree": {"budget": None, **options}}


def greedy() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=34 - 2 * i, ignore_eos=True, logprobs=2) for i in range(len(BATCH))
    ]


def mixed() -> list[SamplingParams]:
    """Seeded, unseeded and greedy in turn."""
    laws: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0},
        {"temperature": 0},
        {"temperature": 1.0, "seed": 6, "top_k": 20, "repetition_penalty": 1.1},
    ]
    return [SamplingParams(max_tokens=24 + i, ignore_eos=True, logprobs=2, **laws[i % 4]) for i in range(len(BATCH))]


REPEATABLE = [i for i, params in enumerate(mixed()) if params.temperature == 0 or params.seed is not None]


def parameters() -> list[SamplingParams]:
    """Every kind twice: greedy, and sampled without a seed."""
    shared = {"max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    return [
        SamplingParams(**{**shared, "temperature": temperature, **kind})
        for kind in KINDS.values()
        for temperature in (0, 1.0)
    ]


def structured() -> list[SamplingParams]:
    """Greedy and sampled in turn; every fourth is free and gets a tree."""
    return [
        SamplingParams(
            temperature=i % 2,
            max_tokens=40,
            logprobs=2,
            structured_outputs=None if i % 4 == 3 else StructuredOutputsParams(regex=CALL),
        )
        for i in range(len(BATCH))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models made by hand: C2T's gate opens at a path probability of 1/20, MCSD's at a best token of 0.4, or a first
    number of 0.4 in the hidden state."""
    path = tmp_path_factory.mktemp("models")
    hidden = json.loads((Path(DRAFT) / "config.json").read_text())["hidden_size"]
    by_hand = (("c2t", 3, 0, 20.0, -1.0), ("mcsd", 11, 1, 4.0, -2.0), ("hidden", hidden, 0, 4.0, -2.0))
    for name, inputs, feature, slope, offset in by_hand:
        gate = Gate(inputs, 4)
        weights = {key: torch.zeros_like(weight) for key, weight in gate.state_dict().items()}
        weights["layers.0.weight"][0, feature] = 1.0
        weights["layers.2.weight"][0, 0] = slope
        weights["layers.2.bias"][0] = offset
        save_file(weights, path / f"{name}.safetensors")
    (path / "vector.json").write_text(json.dumps({"vector": [0.4, 0.12, 0.07, 0.04, 0.03, 0.02, 0.015]}))
    return path


@pytest.fixture(scope="module")
def sampled(engines: Engines, folder: Path) -> dict[str, dict[str, Any]]:
    """Outputs of two rules for every parameter."""
    found = {}
    for rule, method in (("rrsw", "dyspec"), ("traversal", "static_tree")):
        llm = engines.start(spec(folder, method, {}, rule))
        with pytest.MonkeyPatch.context() as patch:
            spy = TreeSpy(llm, patch)
            outputs = llm.generate(PROMPTS[: len(parameters())], parameters(), use_tqdm=False)
            assert any(len(t.branches()) > 2 for t in spy.trees)
        found[rule] = {
            "parameters": outputs,
            "greedy": generate(llm, BATCH, greedy()),
            "structured": generate(llm, BATCH, structured()),
        }
    return found


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, Any]:
    llm = engines.start()
    kinds = {"greedy": greedy(), "mixed": mixed(), "structured": structured()}
    return {name: generate(llm, BATCH, params) for name, params in kinds.items()}


@pytest.fixture(scope="module")
def reference(engines: Engines, sampled: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same without speculation."""
    llm = engines.start()

    def continued(output: Any) -> list[float]:
        """The logprobs that plain vLLM gives to the tokens of an output."""
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        entries = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0].prompt_logprobs
        pairs = list(zip(entries, tokens, strict=True))[len(output.prompt_token_ids) :]
        return [entry[token].logprob for entry, token in pairs]

    return {
        "greedy": generate(llm, BATCH, greedy()),
        "parameters": generate(llm, PROMPTS[: len(parameters())], parameters()),
        "structured": generate(llm, BATCH, structured()),
        "continued": {rule: [continued(output) for output in own["parameters"]] for rule, own in sampled.items()},
    }


@pytest.mark.parametrize("name", METHODS)
def test_greedy_and_seeded(
    engines: Engines, plain: dict[str, Any], folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, options, rule = METHODS[name]
    llm = engines.start(spec(folder, method, options))
    assert runner_of(llm).pair.rule_name == rule
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain["greedy"], generate(llm, BATCH, greedy()))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    ours = generate(llm, BATCH, mixed())
    assert_identical([plain["mixed"][i] for i in REPEATABLE], [ours[i] for i in REPEATABLE])
    assert [len(output.token_ids) for output in ours] == [params.max_tokens for params in mixed()]
    assert_identical(plain["structured"][::2], generate(llm, BATCH, structured())[::2])
    if "gate" in options:
        assert len({len(t) for t in spy.trees}) > 2, "the gate decides nothing"
    if options.get("mode") == "chain":
        assert all(t.is_chain for t in spy.trees)
        assert any(len(t) > 1 for t in spy.trees)
    else:
        assert any(len(t.branches()) > 2 for t in spy.trees)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_under_every_rule(
    engines: Engines, plain: dict[str, Any], folder: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, options, kind = RULES[rule]
    llm = engines.start(spec(folder, method, options, rule))
    assert runner_of(llm).pair.proposer.kind == kind
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain["greedy"], generate(llm, BATCH, greedy()))
    ours = generate(llm, BATCH, mixed())
    repeatable = [i for i in REPEATABLE if rule == "target_only" or mixed()[i].temperature == 0]
    assert_identical([plain["mixed"][i] for i in repeatable], [ours[i] for i in repeatable])
    assert [len(output.token_ids) for output in ours] == [params.max_tokens for params in mixed()]
    assert_identical(plain["structured"][::2], generate(llm, BATCH, structured())[::2])
    assert any(len(t.branches()) > 2 for t in spy.trees)


@pytest.mark.parametrize("rule", ["rrsw", "traversal"])
def test_every_parameter_under_a_rule(reference: dict[str, Any], sampled: dict[str, Any], rule: str) -> None:
    outputs = [output.outputs[0] for output in sampled[rule]["parameters"]]
    assert_identical(reference["greedy"], sampled[rule]["greedy"])
    assert_identical(reference["parameters"][::2], outputs[::2])
    for ours, theirs in zip(outputs, reference["continued"][rule], strict=True):
        here = [entry[token].logprob for entry, token in zip(ours.logprobs, ours.token_ids, strict=True)]
        assert here == pytest.approx(theirs, abs=1e-4)
    of = dict(zip(KINDS, outputs[1::2], strict=True))
    assert not {300, 201} & set(of["logit_bias"].token_ids)
    assert 262 in of["logit_bias"].token_ids
    assert len(of["min_tokens"].token_ids) >= 17
    assert not any(word in of["bad_words"].text for word in ("the", " self", "import"))
    assert of["stop"].finish_reason == "stop"
    assert of["stop"].stop_reason in ("e", "self")
    for name, output in of.items():
        assert len(output.token_ids) == 30 or name in ("min_tokens", "stop")


@pytest.mark.parametrize("rule", ["rrsw", "traversal"])
def test_structured_output_under_a_rule(reference: dict[str, Any], sampled: dict[str, Any], rule: str) -> None:
    ours = sampled[rule]["structured"]
    assert_identical(reference["structured"][::2], ours[::2])
    ended = [one for i, one in enumerate(ours) if i % 4 < 3 and one.finish_reason == "stop"]
    assert len(ended) >= len(BATCH) // 3
    assert all(re.fullmatch(CALL, output.text) for output in ended)
