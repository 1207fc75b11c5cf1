"""Classes that people serve: the tokens of tiny models of each, with and without trees, are the same.

The draft knows how the texts go on, and offers a wrong branch at every depth; no second model runs. Prompts and outputs
cross borders of blocks and of windows.
"""

import importlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import SamplingParams
from vllm.distributed import destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import V2, Engines, assert_identical, generate, metric, runner_of
from tests.engine.families import FAMILIES, LAYERS, SHORT, Family
from tests.engine.known import known
from tests.engine.ties import first_difference, gap
from vllm_adaptive_tree.engine.v1.startup_costs import target_forward

LENGTHS = [29, 62, 97] if V2 else [29, 62, 40, 97]
"""Of the prompts; blocks have 32 tokens."""
TOKENS, NODES = (16, 8) if V2 else (40, 12)
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
WITH_TREES = [name for name, one in FAMILIES.items() if not one.hybrid]
CLOSE = 2
"""Units in the last place of a logit in bfloat16: tokens that are so close may change places."""


def prompts(lengths: list[int], vocabulary: int, seed: int = 0) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(1, vocabulary) for _ in range(length)]} for length in lengths]


def begin_anew(engines: Engines) -> None:
    """vLLM keeps the groups of ranks of a process, and a first model without experts leaves none for experts."""
    engines.shutdown()
    destroy_model_parallel()


def refused(name: str) -> bool:
    """Return whether a family is served on the other model runner alone."""
    family = FAMILIES[name]
    return "kv_cache_dtype" in family.arguments if V2 else family.latent


class Run:
    """A family's plain outputs, and what an engine with trees needs to be compared with them."""

    def __init__(
        self,
        engines: Engines,
        family: Family,
        folder: Path,
        lengths: list[int] = LENGTHS,
        seed: int = 0,
        **arguments: Any,
    ):
        self.engines, self.family, self.folder = engines, family, folder
        self.asked = prompts(lengths, family.built().vocab_size, seed)
        self.arguments: dict[str, Any] = {
            "model": family.saved(folder / "model", seed),
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            **arguments,
            **family.arguments,
        }
        begin_anew(engines)
        self.plain = generate(engines.start(**self.arguments), self.asked, PARAMS)
        self.varied = sum(len(set(output.token_ids)) for output in self.plain) > TOKENS

    def texts(self) -> list[list[int]]:
        ids = [prompt["prompt_token_ids"] for prompt in self.asked]
        return [[*prompt, *output.token_ids] for prompt, output in zip(ids, self.plain, strict=True)]

    def trees(self, nodes: int = NODES) -> list[Any]:
        llm = self.engines.start(known(self.texts(), self.folder, nodes), **self.arguments)
        return self.again(llm)

    def again(self, llm: Any) -> list[Any]:
        before = metric(llm, "spec_decode_num_accepted_tokens")
        found = generate(llm, self.asked, PARAMS)
        accepted = metric(llm, "spec_decode_num_accepted_tokens") - before
        assert accepted > TOKENS * len(self.asked) / 3  # a small tree may hold one right token
        return found


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in WITH_TREES])
def test_identity(engines: Engines, name: str, seeing: None, tmp_path: Path) -> None:
    if refused(name):
        pytest.skip("refused on this model runner")
    run = Run(engines, FAMILIES[name], tmp_path, dtype="float32")
    assert run.varied, "constant texts prove nothing"
    assert_identical(run.plain, run.trees())
    assert_identical(run.plain, run.again(engines.llm))  # prompts out of the prefix cache
    runner = runner_of(engines.llm)
    assert len(runner.kv_cache_config.kv_cache_groups) == FAMILIES[name].groups
    if not V2:
        with torch.no_grad():
            logits = target_forward(runner, 8)()
        assert len(logits.unique(dim=0)) == 8, "equal rows have equal experts, and a profile would not see the others"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_TREES if "dtype" not in FAMILIES[name].arguments])
def test_bfloat16(engines: Engines, name: str, seeing: None, tmp_path: Path) -> None:
    """A row's logits depend on the rows beside it: without trees, too, a text may differ alone and in a batch."""
    if refused(name):
        pytest.skip("refused on this model runner")
    run = Run(engines, FAMILIES[name], tmp_path, dtype="bfloat16", logprobs_mode="raw_logits")
    assert run.varied, "constant texts prove nothing"
    alone = [generate(engines.llm, [prompt], PARAMS)[0] for prompt in run.asked]
    gaps = []
    for others in (alone, run.trees()):
        parts = zip(others, run.plain, strict=True)
        gaps.append(
            [gap(plain, at, "bfloat16") for one, plain in parts if (at := first_difference(one, plain)) is not None]
        )
    print(f"{name}: gaps of texts alone {gaps[0]}, with trees {gaps[1]} of {len(alone)}")
    assert all(one <= CLOSE for one in gaps[1])


def test_a_commit_to_the_first_group_alone_shows(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: every cache group has a commit of its own."""
    run = Run(engines, FAMILIES["gemma2"], tmp_path)
    llm = engines.start(known(run.texts(), tmp_path, NODES), **run.arguments)
    verification = importlib.import_module(f"vllm_adaptive_tree.engine.{'v2' if V2 else 'v1'}.verification")
    commit = verification.Verification.commit

    def first(step: Any, nodes: Any, *rest: Any) -> None:
        if V2:
            metadata, *more = rest
            names = set(runner_of(llm).kv_cache_config.kv_cache_groups[0].layer_names)
            commit(step, nodes, {name: one for name, one in metadata.items() if name in names}, *more)
            return
        step.groups = step.groups[:1]
        commit(step, nodes, *rest)

    monkeypatch.setattr(verification.Verification, "commit", first)
    with pytest.raises(AssertionError, match="differs at token"):
        assert_identical(run.plain, generate(llm, run.asked, PARAMS))


def beside_a_draft(family: str, layers: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine arguments and a speculative_config: a target of the family, and a Llama of so many layers."""
    target = FAMILIES[family]
    size = target.fields.get("head_dim", 32)
    draft = replace(FAMILIES["llama"], fields={"head_dim": size, "num_hidden_layers": layers})
    models = target.saved(folder / "target"), draft.saved(folder / f"draft-{layers}")
    arguments = {"model": models[0], "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8}
    tree = {"budget": None, "threshold": 0}
    return arguments, {"method": "opt_tree", "model": models[1], "num_speculative_tokens": NODES, "tree": tree}


def test_a_draft_beside_windows(engines: Engines, tmp_path: Path) -> None:
    """vLLM parts more layers than a cache group holds."""
    arguments, tree = beside_a_draft("gemma2", 4, tmp_path)
    with pytest.raises(ValueError, match="vLLM parts the draft's 4 layers among .* disable_hybrid_kv_cache_manager"):
        engines.start(tree, **arguments)
    asked = prompts(LENGTHS, FAMILIES["gemma2"].built().vocab_size)
    plain = generate(engines.start(**arguments), asked, PARAMS)
    one = beside_a_draft("gemma2", 1, tmp_path)[1]
    for config, more in ((one, {}), (tree, {"disable_hybrid_kv_cache_manager": True})):
        llm = engines.start(config, **arguments, **more)
        assert_identical(plain, generate(llm, asked, PARAMS))
        assert metric(llm, "spec_decode_num_draft_tokens") > NODES * len(asked)


def test_a_window_of_every_layer_is_its_drafts_too(engines: Engines, tmp_path: Path) -> None:
    arguments, tree = beside_a_draft("mistral-window", 1, tmp_path)
    with pytest.raises(ValueError, match="a sliding window in every layer, .* use 'ngram' or 'suffix'"):
        engines.start(tree, **arguments)


def logprobs(output: Any) -> list[float]:
    """Of its tokens."""
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


SEEDS = 50
FAST = (0,) if V2 else (2, 4, 5, 7)
"""Of V1: the classes without a row of `SHORT`."""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed not in FAST)) for seed in range(SEEDS)]
)
def test_random_configurations(engines: Engines, seed: int, tmp_path: Path) -> None:
    """Of classes that are allowed: heads, groups, windows, block sizes, lengths around borders of blocks and windows,
    chunks of prompts, sizes of trees."""
    draw = random.Random(seed)
    name = ("gemma2", "gpt-oss", "mistral-window", "qwen3-moe", "cohere2", "gemma3", "llama", "qwen3")[seed % 8]
    family, kv_heads, block = FAMILIES[name], draw.choice((1, 2, 3)), draw.choice((32, 64, 96))
    layers, size = draw.randint(2, 4), draw.choice((32, 64, 80, 96, 128))
    # Model Runner V2 refuses windows that end inside a tree.
    window = draw.choice((draw.randint(20 if V2 else 2, 40), draw.randint(30, 100)))
    changes: dict[str, Any] = {
        "hidden_size": 192,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice((1, 2, 4)),
        "head_dim": size,
        "num_hidden_layers": layers,
    }
    if "sliding_window" in family.fields:
        changes["sliding_window"] = window
    if "layer_types" in family.fields:
        first = draw.randint(0, 1)
        changes["layer_types"] = [LAYERS[(first + layer) % 2] for layer in range(layers)]
    arguments = {"block_size": block, "max_num_batched_tokens": draw.choice((64, 512))}
    lengths = [max(draw.choice((block, 2 * block, window, window + 32)) + draw.randint(-3, 2), 2) for _ in range(4)]
    family = replace(family, fields={**family.fields, **changes})
    run = Run(engines, family, tmp_path, lengths, seed + 1, **arguments)
    ours = run.trees(draw.randint(3, 12 if V2 else 24))
    assert_identical(run.plain, ours)
    for one, other in zip(ours, run.plain, strict=True):  # texts of random weights may be constant; these are not
        if one.token_ids == other.token_ids:
            assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)


def without_weights(family: str, folder: Path, **fields: Any) -> str:
    """A folder with a config.json alone."""
    getattr(transformers, family)(**fields).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("DeepseekV32ForCausalLM", "DeepseekV32Config", "multi-head latent attention (MLA) of this class"),
        ("JambaForCausalLM", "JambaConfig", "state-space or linear layers of this class"),
    ],
)
def test_what_is_refused_by_its_config(architecture: str, config: str, words: str, tmp_path: Path) -> None:
    folder = without_weights(config, tmp_path, architectures=[architecture])
    with pytest.raises(ValueError, match="cannot be served with a tree method") as error:
        EngineArgs(
            model=folder, skip_tokenizer_init=True, max_model_len=256, speculative_config=known([], tmp_path, NODES)
        ).create_engine_config()
    assert words in str(error.value)


WINDOWS = {"sliding_window": 40, "num_hidden_layers": 2, "layer_types": LAYERS[:2]}
CHUNKS = {
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 64,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
}
SHARED = {**FAMILIES["gemma4"].fields, "num_kv_shared_layers": 2}


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        ("Exaone4Config", WINDOWS, r"layer 'model.layers.0.self_attn.attn' uses a sliding window"),
        ("Llama4TextConfig", CHUNKS, r"layer '\S*layers.0.self_attn.attn' is a ChunkedLocalAttention"),
        ("Gemma4TextConfig", SHARED, r"layer 'model.layers.2.self_attn.attn' uses the KV cache of another layer"),
        ("BloomConfig", {"tie_word_embeddings": True}, r"layer '\S*.attn' uses ALiBi"),
    ],
)
def test_what_is_refused_by_its_layer(
    engines: Engines, config: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = Family(config, "", fields).saved(tmp_path / "model")
    begin_anew(engines)
    with pytest.raises(ValueError, match=words):
        engines.start(known([], tmp_path, NODES), model=model, skip_tokenizer_init=True, max_model_len=256)
