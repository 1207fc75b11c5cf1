"""A draft that does not fit the target is refused when the configuration is built, with both facts and the remedy."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.config.vllm import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.config.checkpoints import (
    DFLASH2_TENSORS,
    DFLASH_TENSORS,
    DSPARK_TENSORS,
    EAGLE3,
    EAGLE3_TENSORS,
    EAGLE_TENSORS,
    ONE_LAYER,
    PEAGLE_TENSORS,
    SILENT,
    WHOLE,
    Shapes,
    build,
    speculators,
    written,
)
from tests.engine import heads
from tests.engine.engines import DRAFT, TARGET
from tests.engine.heads import CONFIG, HIDDEN, VOCABULARY
from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.drafts import block, registry
from vllm_adaptive_tree.engine.drafts.block import XPress
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.targets import vocabulary

LAYERS = CONFIG["num_hidden_layers"]
IDS = "eagle_aux_hidden_state_layer_ids"
D2T = {**EAGLE3_TENSORS, "d2t": (512,)}
MIMO = {**CONFIG, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}

PEAGLE = {**EAGLE3, "architectures": ["PEagleDraftModel"], "ptd_token_id": 0, "num_depths": 5}
DFLASH = heads.DFLASH | {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [2, 5]}}
DFLASH2 = {
    **DFLASH,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {**DFLASH["dflash_config"], **heads.SELECTOR},
}

WINDOWED = {
    **ONE_LAYER,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
}

UNFIT: dict[str, tuple[dict[str, Any], Shapes, list[str]]] = {
    "hidden size of an EAGLE head": (
        {**SILENT, "hidden_size": 128},
        {"fc.weight": (128, 256)},
        ["hidden states of 128 (hidden_size)", f"the target's have {HIDDEN}"],
    ),
    "hidden size of an EAGLE-3 head": (
        {**EAGLE3, "hidden_size": 128},
        {**EAGLE3_TENSORS, "fc.weight": (128, 3 * 128)},
        ["hidden states of 128 (hidden_size)", f"the target's have {HIDDEN}"],
    ),
    "target_hidden_size": (
        {**EAGLE3, "target_hidden_size": 4096},
        EAGLE3_TENSORS,
        ["hidden states of 4096 (target_hidden_size)", f"the target's have {HIDDEN}"],
    ),
    "width of an EAGLE head": (
        SILENT,
        {"fc.weight": (HIDDEN, HIDDEN)},
        ["joins inputs of 256 (fc.weight)", "one hidden state of this target have 512"],
    ),
    "more auxiliary states than ids": (
        EAGLE3,
        {**EAGLE3_TENSORS, "fc.weight": (HIDDEN, 4 * HIDDEN)},
        ["joins inputs of 1024", "3 layers [2, 4, 5] of this target have 768"],
    ),
    "fewer auxiliary states than ids": (
        {**EAGLE3, IDS: [1, 2, 4, 5]},
        EAGLE3_TENSORS,
        ["joins inputs of 768", "4 layers [1, 2, 4, 5] of this target have 1024"],
    ),
    "ids of another target": ({**EAGLE3, IDS: [2, 16, 29]}, EAGLE3_TENSORS, ["[2, 16, 29]", IDS, f"at most {LAYERS}"]),
    "ids that fall": ({**EAGLE3, IDS: [5, 4, 2]}, EAGLE3_TENSORS, ["[5, 4, 2]", "must increase"]),
    "ids twice": ({**EAGLE3, "eagle_config": {IDS: [2, 2, 5]}}, EAGLE3_TENSORS, ["[2, 2, 5]", "must increase"]),
    "ids below 0": ({**EAGLE3, IDS: [-1, 2, 5]}, EAGLE3_TENSORS, ["[-1, 2, 5]", "from 0"]),
    "vocabulary": (
        {**EAGLE3, "vocab_size": 2000},
        EAGLE3_TENSORS,
        ["vocabulary of 2000", f"{VOCABULARY}", "tokenizer"],
    ),
    "a larger draft vocabulary": (
        {**EAGLE3, "draft_vocab_size": 4096},
        D2T,
        ["from 4096 tokens (draft_vocab_size)", f"the target has {VOCABULARY}"],
    ),
    "a reduced vocabulary without d2t": (
        {**EAGLE3, "draft_vocab_size": 512},
        EAGLE3_TENSORS,
        [f"512 of {VOCABULARY} tokens", "no tensor 'd2t'"],
    ),
    "a whole vocabulary with d2t": (EAGLE3, D2T, [f"all {VOCABULARY} tokens", "a tensor 'd2t'", "remove 'd2t'"]),
    "a family without a class": (
        {**SILENT, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        EAGLE_TENSORS,
        ["an EAGLE head of architecture 'EagleQwen2ForCausalLM'", "does not have"],
    ),
    "no architecture": (
        {**SILENT, "architectures": []},
        EAGLE_TENSORS,
        ["does not have", "correct 'architectures'"],
    ),
    "no block size": ({**DFLASH, "block_size": None}, DFLASH_TENSORS, ["how many tokens", "block_size None"]),
    "a block of the root alone": ({**DFLASH, "block_size": 1}, DFLASH_TENSORS, ["block_size 1 ", "set block_size"]),
    "no mask token": (
        {**DFLASH, "dflash_config": {"target_layer_ids": [2, 5]}},
        DFLASH_TENSORS,
        ["mask_token_id None"],
    ),
    "a mask token of another tokenizer": (
        {**DFLASH, "dflash_config": {"target_layer_ids": [2, 5], "mask_token_id": 151669}},
        DFLASH_TENSORS,
        ["mask_token_id 151669", f"of {VOCABULARY} tokens"],
    ),
    "no layer ids": (
        {**DFLASH, "dflash_config": {"mask_token_id": 0}},
        DFLASH_TENSORS,
        ["which layers of the target", "set target_layer_ids"],
    ),
    "layer ids of another target": (
        {**DFLASH, "dflash_config": {"mask_token_id": 0, "target_layer_ids": [2, 16]}},
        DFLASH_TENSORS,
        ["[3, 17]", "target_layer_ids", f"at most {LAYERS}"],
    ),
    "width of a DFlash head": (
        DFLASH,
        {**DFLASH_TENSORS, "fc.weight": (HIDDEN, 5 * HIDDEN)},
        ["joins inputs of 1280", "2 layers [3, 6] of this target have 512"],
    ),
    "hidden size of a DFlash head": (
        {**DFLASH, "hidden_size": 128},
        {**DFLASH_TENSORS, "fc.weight": (128, 256)},
        ["hidden states of 128", f"the target's have {HIDDEN}"],
    ),
    "vocabulary of a DFlash head": ({**DFLASH, "vocab_size": 2000}, DFLASH_TENSORS, ["vocabulary of 2000"]),
    "a reduced vocabulary of a DFlash head without d2t": (
        {**DFLASH, "draft_vocab_size": 512},
        DFLASH_TENSORS,
        [f"512 of {VOCABULARY} tokens", "no tensor 'd2t'"],
    ),
    "a reduced vocabulary of a DFlash head without its output": (
        {**DFLASH, "draft_vocab_size": 512},
        {**DFLASH_TENSORS, "d2t": (512,)},
        [f"512 of {VOCABULARY} tokens", "no tensor 'lm_head.weight'"],
    ),
    "P-EAGLE without its number of depths": (
        {**PEAGLE, "num_depths": None},
        PEAGLE_TENSORS,
        ["how many tokens", "num_depths None", "set num_depths"],
    ),
    "P-EAGLE of one depth": ({**PEAGLE, "num_depths": 1}, PEAGLE_TENSORS, ["num_depths 1 ", "at least 2"]),
    "P-EAGLE without a mask token": ({**PEAGLE, "ptd_token_id": None}, PEAGLE_TENSORS, ["mask_token_id None"]),
    "P-EAGLE with a mask token of another tokenizer": (
        {**PEAGLE, "ptd_token_id": 128256},
        PEAGLE_TENSORS,
        ["mask_token_id 128256", f"of {VOCABULARY} tokens"],
    ),
    "P-EAGLE without the state of its mask tokens": (
        PEAGLE,
        EAGLE3_TENSORS,
        ["a P-EAGLE head (architecture", "an EAGLE-3 head (tensor 'midlayer.hidden_norm.weight') by its tensors"],
    ),
    "P-EAGLE whose mask has another width": (
        PEAGLE,
        {**PEAGLE_TENSORS, "mask_hidden": (1, 1, 4 * HIDDEN)},
        ["joins inputs of 1024 (mask_hidden)", "3 layers [2, 4, 5] of this target have 768"],
    ),
    "P-EAGLE of a family without a class": (
        {**PEAGLE, "architectures": ["PeagleGemmaForCausalLM"]},
        PEAGLE_TENSORS,
        ["a P-EAGLE head of architecture", "PeagleGemmaForCausalLM", "does not have"],
    ),
    "windows": (
        {**DFLASH, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        DFLASH_TENSORS,
        ["a DFlash head with sliding-window attention", "not served yet"],
    ),
    "windows of a DFlash head of speculators": (
        speculators("dflash", block_size=8, transformer_layer_config=WINDOWED),
        DFLASH_TENSORS,
        ["a DFlash head with sliding-window attention", "not served yet"],
    ),
    "windows of a DSpark head of speculators": (
        speculators("dspark", block_size=8, markov_rank=16, transformer_layer_config=WINDOWED),
        DSPARK_TENSORS,
        ["a DSpark head with sliding-window attention", "not served yet"],
    ),
    "windows from a layer on": (
        {**DFLASH, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        DFLASH_TENSORS,
        ["a DFlash head with sliding-window attention", "not served yet"],
    ),
    "windows of all layers": (
        {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "use_swa": True, "swa_window_size": 64}},
        DFLASH_TENSORS,
        ["a DFlash head with sliding-window attention", "not served yet"],
    ),
    "sinks": (
        {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "attention_sink_bias": True}},
        DFLASH_TENSORS,
        ["attention sinks", "not served yet"],
    ),
    "a DFlash head of another family": (
        {**DFLASH, "architectures": ["DFlashLagunaForCausalLM"]},
        DFLASH_TENSORS,
        ["'DFlashDraftModel'", "'DFlashLagunaForCausalLM'"],
    ),
    "a DSpark head of another family": (
        {**DFLASH, "architectures": ["Gemma4DSparkModel"], "markov_rank": 16},
        DSPARK_TENSORS,
        ["'Gemma4DSparkModel'", "'Qwen3DSparkModel'"],
    ),
    "a DFlash2 head without candidates": (
        {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], "selector_top_k": None}},
        DFLASH2_TENSORS,
        ["a DFlash2 head with no selector_top_k", "not served yet"],
    ),
    "a DFlash2 head of a reduced vocabulary": (
        {**DFLASH2, "draft_vocab_size": 512},
        {**DFLASH2_TENSORS, "d2t": (512,)},
        ["a DFlash2 head with a reduced vocabulary", "not served yet"],
    ),
    "a LiLiCorr head without layers": (
        {**DFLASH, "architectures": ["LiLiCorrDraftModel"]},
        {**DFLASH_TENSORS, "lilicorr.in_head.weight": (8, 32)},
        ["a LiLiCorr head with no lilicorr_candidate_topk", "not served yet"],
    ),
    "another Markov head": (
        {**DFLASH, "architectures": ["Qwen3DSparkModel"], "markov_rank": 16, "markov_head_type": "gated"},
        DSPARK_TENSORS,
        ["a Markov head of type 'gated'", "not served yet"],
    ),
    "a family that speculators knows and vLLM does not": (
        speculators("eagle3", transformer_layer_config={**ONE_LAYER, "model_type": "gemma"}),
        EAGLE3_TENSORS,
        ["cannot read a draft", "gemma", "this release drafts with an independent model"],
    ),
}


@pytest.mark.parametrize(
    "which",
    [pytest.param(one, marks=[heads.ON_V1] * ("P-EAGLE" in one)) for one in UNFIT],
)
def test_a_head_of_another_target(which: str, tmp_path: Path) -> None:
    config, tensors, words = UNFIT[which]
    with pytest.raises(ValueError, match=r"speculative_config\['model'\]: ") as error:
        build(written(tmp_path / "draft", {key: one for key, one in config.items() if one is not None}, tensors))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({IDS: [0, 4, LAYERS]}, EAGLE3_TENSORS),
        ({IDS: [1, 3, 5, 7]}, {**EAGLE3_TENSORS, "fc.weight": (HIDDEN, 4 * HIDDEN)}),
        ({"eagle_config": {IDS: [1, 6]}}, {**EAGLE3_TENSORS, "fc.weight": (HIDDEN, 2 * HIDDEN)}),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {"midlayer.hidden_norm.weight": (HIDDEN,)}),
        ({"draft_vocab_size": 512}, D2T),
        ({"hidden_size": 128, "target_hidden_size": HIDDEN}, {**EAGLE3_TENSORS, "fc.weight": (128, 3 * HIDDEN)}),
    ],
)
def test_heads_that_fit(changes: dict[str, Any], tensors: Shapes, tmp_path: Path) -> None:
    config = build(written(tmp_path / "draft", {**EAGLE3, **changes}, tensors))
    assert config.speculative_config.method == "eagle3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 3}, ["cannot be cut for tensor_parallel_size=3", "attention heads"]),
        ({"keys": {"draft_tensor_parallel_size": 2}}, ["'draft_tensor_parallel_size'] is 2", "tensor_parallel_size 1"]),
        ({"keys": {"method": "mcsd", "tree": {"init_width": 2, "allow_lossy": True}}}, ["'init_width'", "'eagle3'"]),
    ],
)
def test_options_that_a_head_does_not_take(arguments: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speculative_config") as error:
        build(heads.eagle3(tmp_path / "draft"), **arguments)
    assert all(word in str(error.value) for word in words), error.value


@pytest.fixture
def on_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration alone, which is built without Triton too."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for module in ("vllm.triton_utils", "vllm.config.vllm"):
        monkeypatch.setattr(f"{module}.HAS_TRITON", True)


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (heads.dflash, 1 + heads.DEPTH),
        (heads.dflash2, 1 + heads.DEPTH),
        (heads.dspark, heads.DEPTH),
        (heads.dspark_fill_in, 1 + heads.DEPTH),
    ],
)
def test_no_more_requests_run_than_those_whose_blocks_fit_a_step(
    on_v2: None, make: Any, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(block.logger, "warning", lambda text, *values: said.append(text % values))
    draft, room = make(tmp_path / "draft"), 10 * rows + 3
    given: dict[str, Any] = {"keys": {"num_speculative_tokens": 9}, "max_num_batched_tokens": room}
    fits = build(draft, **given, max_num_seqs=10)
    assert fits.use_v2_model_runner
    assert fits.scheduler_config.max_num_active_seqs is None
    assert not said
    assert build(draft, **given, max_num_seqs=11).scheduler_config.max_num_active_seqs == 10
    if not hasattr(VllmConfig, "_limit_max_model_len_to_draft"):  # vLLM 0.33 does it itself, by our number of slots
        assert "of 11 requests 10 run at once (max_num_active_seqs)" in said[0]
        assert f"max_num_batched_tokens={room}; raise that to {11 * rows} to run all" in said[0]
    kept = build(draft, **given, max_num_seqs=11, max_num_active_seqs=7)
    assert kept.scheduler_config.max_num_active_seqs == 7


def test_heads_that_vllm_has_on_one_runner_alone(on_v2: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which vLLM runs on Model Runner V1 alone, on CPUs; use another draft"):
        build(heads.peagle(tmp_path / "draft"))


def test_a_runner_that_vllm_chooses(on_v2: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton for CPUs it is V2, without a variable that asks for it."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert build(heads.dflash(tmp_path / "block")).use_v2_model_runner
    with pytest.raises(ValueError, match="which vLLM runs on Model Runner V1 alone"):
        build(heads.peagle(tmp_path / "draft"))


def test_an_embedding_with_adapters(on_v2: None, tmp_path: Path) -> None:
    keys = {"num_speculative_tokens": 9, "tree": {"budget": None}}
    with pytest.raises(ValueError, match="reads an embedding without LoRA; remove enable_lora"):
        build(heads.lilicorr(tmp_path / "draft"), keys=keys, enable_lora=True)
    assert build(heads.lilicorr(tmp_path / "draft"), keys=keys).use_v2_model_runner


@pytest.mark.skipif(heads.XPRESS, reason="vLLM has these heads here")
def test_an_xpress_head_needs_another_vllm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is an XPress head, which vLLM 0\.32 does not have; use vLLM 0\.33"):
        build(heads.xpress(tmp_path / "draft"))


def test_an_xpress_head_mixes_as_many_places_as_it_predicts(tmp_path: Path) -> None:
    folder = Path(heads.xpress(tmp_path / "draft"))
    config = json.loads((folder / "config.json").read_text())
    for given, message in (
        ({"xpress_block_size": 9}, r"xpress_block_size 9 .* tensor 'xpress_head\.mix\.L' is one of 6 places"),
        ({"xpress_block_size": 1}, "xpress_block_size 1 in its config.json"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **given}))
        with pytest.raises(ValueError, match=message):
            XPress("xpress").levels(Checkpoint.read(str(folder), None, False))
    del config["xpress_block_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert XPress("xpress").levels(Checkpoint.read(str(folder), None, False)) == heads.DEPTH, "by its block_size"


def test_a_lilicorr_head_names_its_width(tmp_path: Path) -> None:
    folder = Path(heads.lilicorr(tmp_path / "draft"))
    config = json.loads((folder / "config.json").read_text())
    width = config["dflash_config"].pop("lilicorr_hidden_size", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no lilicorr_hidden_size"):
        build(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "lilicorr_hidden_size": width}))
    built = build(str(folder)).speculative_config.draft_model_config.hf_config
    assert built.dflash_config["lilicorr_hidden_size"] == width


@pytest.mark.parametrize("given", [60, 4])
def test_a_block_has_slots_where_a_shape_has_fewer_nodes(on_v2: None, given: int, tmp_path: Path) -> None:
    keys = {"method": "static_tree", "num_speculative_tokens": given, "tree": {"shape": [2, 1]}}
    config = build(heads.dflash(tmp_path / "draft"), keys=keys)
    assert config.speculative_config.num_speculative_tokens == tree_options(config).num_speculative_tokens == 4
    assert config.num_lookahead_tokens == 1 + heads.DEPTH


def test_a_look_up_has_no_hidden_states(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'type1' reads the draft's hidden states, and 'ngram' has none"):
        build("ngram", keys={"method": "mcsd", "tree": {"stop": "type1"}})


def test_a_target_that_gives_no_auxiliary_states(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCABULARY, "n_embd": HIDDEN}
    target = written(tmp_path / "target", {**gpt2, "n_layer": LAYERS, "n_head": 4, "n_positions": 1024}, WHOLE)
    arguments = {"target": target, "tokenizer": TARGET}
    with pytest.raises(ValueError, match=r"EAGLE-3 head, and the target \(GPT2LMHeadModel\) gives no auxiliary"):
        build(heads.eagle3(tmp_path / "draft"), **arguments)
    assert build(heads.eagle(tmp_path / "other"), **arguments).speculative_config.method == "eagle"


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("own", "given", "rope", "longest"),
    [
        (128, None, {}, 512),
        (128, 100, {}, 100),
        (1024, 100, {}, 100),
        (1024, None, {}, 512),
        (128, None, {"rope_parameters": YARN}, 128),
    ],
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_shorter_context_than_the_target_s(
    kind: str, own: int, given: int | None, rope: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    """A head drafts up to the target's length, where its RoPE can be extended to there."""
    base, tensors = (SILENT, EAGLE_TENSORS) if kind == "eagle" else (EAGLE3, EAGLE3_TENSORS)
    draft = written(tmp_path / "draft", {**base, **rope, "max_position_embeddings": own}, tensors)
    built = build(draft, keys={"max_model_len": given})
    config = built.speculative_config.draft_model_config
    assert config.max_model_len == longest
    assert built.model_config.max_model_len == 512
    assert rope or config.hf_config.max_position_embeddings == max(own, 512)


@pytest.mark.skipif(not hasattr(VllmConfig, "_limit_max_model_len_to_draft"), reason="vLLM 0.33 is the first")
@pytest.mark.parametrize(("method", "longest"), [("opt_tree", 512), ("draft_model", 100)])
def test_a_target_keeps_its_context_on_model_runner_v2(
    method: str, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cuts it to the draft's, where a configuration is made and wherever it is made again."""
    draft = written(tmp_path / "draft", json.loads(Path(DRAFT, "config.json").read_text()), WHOLE)
    spec = {"method": method, "model": draft, "num_speculative_tokens": 3, "max_model_len": 100}
    config = EngineArgs(model=TARGET, speculative_config=spec, max_model_len=512).create_engine_config()
    assert config.model_config.max_model_len == 512
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    config._limit_max_model_len_to_draft()
    assert config.model_config.max_model_len == longest


@pytest.mark.parametrize(
    ("config", "tensors", "slots"),
    [(EAGLE3, EAGLE3_TENSORS, 1), (DFLASH, DFLASH_TENSORS, 1 + heads.DEPTH), (None, None, 1)],
)
def test_slots_that_a_request_reserves_for_its_draft(config: Any, tensors: Any, slots: int, tmp_path: Path) -> None:
    """Of 60 nodes none, in any process, but a block's are written to the cache."""
    built = build(DRAFT if config is None else written(tmp_path / "draft", config, tensors))
    assert built.num_lookahead_tokens == pickle.loads(pickle.dumps(built)).num_lookahead_tokens == slots
    chain = EngineArgs(
        model=TARGET, speculative_config={"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
    )
    assert chain.create_engine_config().num_lookahead_tokens == 3


# -- MTP modules


@pytest.mark.parametrize("name", ["target", "eagle3"])
@pytest.mark.parametrize(("model", "said"), [(False, "mtp"), (True, None), (True, "mtp")])
def test_mtp_modules_of_the_target(name: str, model: bool, said: str | None, tmp_path: Path) -> None:
    """`model` may be missing, or be the target's own folder."""
    target = written(tmp_path / name, MIMO, WHOLE)
    config = build(target if model else None, said, target=target, tokenizer=TARGET)
    spec = config.speculative_config
    assert (tree_options(config).draft, spec.method) == ("mtp", "mtp")
    assert spec.model == spec.draft_model_config.model == target
    assert spec.draft_model_config.architectures == ["MiMoMTPModel"]
    assert not spec.use_multi_module_mtp()
    assert (config.num_lookahead_tokens, config.num_prefill_lookahead_tokens) == (1, 1)


def test_vllm_loads_the_mtp_modules_of_some_families_alone(tmp_path: Path) -> None:
    target = written(tmp_path / "target", MIMO, WHOLE)
    with pytest.raises(ValueError, match="is an independent model, and vLLM can load it as 'mtp' only"):
        build(target, "model", target=target, tokenizer=TARGET)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_nextn_predict_layers": 3}, ["has 3 MTP modules", "not served yet"]),
        ({"num_nextn_predict_layers": 0}, ["no MTP module"]),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            ["'llama'", "no MTP module", "remove 'draft'"],
        ),
        ({"architectures": ["Step3p5ForCausalLM"], "model_type": "llama"}, ["Step 3.5", "not served yet"]),
    ],
)
def test_mtp_modules_that_are_not_served(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    target = written(tmp_path / "target", {**MIMO, **changes}, WHOLE)
    with pytest.raises(ValueError, match=r"speculative_config\['model'\]: ") as error:
        build(None, "mtp", target=target, tokenizer=TARGET)
    assert all(word in str(error.value) for word in words), error.value


def test_a_head_of_speculators_as_the_target(tmp_path: Path) -> None:
    head = written(tmp_path / "head", speculators("eagle3"), EAGLE3_TENSORS)
    with pytest.raises(ValueError, match=r"model: .* is a head in the format of speculators, for the target") as error:
        build(None, "mtp", target=head)
    assert all(word in str(error.value) for word in (repr(TARGET), repr(head), "speculative_config['model']"))


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (SILENT, EAGLE_TENSORS, "an EAGLE head (tensor 'fc.weight'"),
        (EAGLE3, {}, "an EAGLE-3 head (architecture 'LlamaForCausalLMEagle3')"),
        (SILENT, EAGLE3_TENSORS, "an EAGLE-3 head (tensor 'midlayer"),
        (DFLASH, {}, "a DFlash head (architecture"),
        ({**DFLASH, "architectures": ["Qwen3DSparkModel"]}, {}, "a DSpark head (architecture"),
        ({**MIMO, "architectures": ["MiMoMTPModel"]}, {}, "an MTP module (architecture 'MiMoMTPModel')"),
    ],
)
def test_another_head_as_the_target(config: dict[str, Any], tensors: Shapes, words: str, tmp_path: Path) -> None:
    head = written(tmp_path / "head", config, tensors)
    with pytest.raises(
        ValueError, match=r"^model: .*, which drafts for a target and is none; give its target"
    ) as error:
        build(heads.eagle3(tmp_path / "draft"), target=head)
    assert words in str(error.value)


def test_a_draft_of_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as the target's, and in another order; special tokens may have other names."""
    warnings: list[str] = []
    monkeypatch.setattr(vocabulary.logger, "warning", lambda text, *values: warnings.append(text % values))
    draft, file = tmp_path / "draft", tmp_path / "draft" / "tokenizer.json"
    shutil.copytree(DRAFT, draft)
    tokenizer = json.loads((Path(TARGET) / "tokenizer.json").read_text())
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = tokenizer["added_tokens"][0]
    assert special["special"]
    tokenizer["added_tokens"] = [{**special, "content": "<another name>"}, *tokenizer["added_tokens"][1:]]
    file.write_text(json.dumps(tokenizer))
    build(str(draft))
    assert not warnings
    tokenizer["model"]["vocab"] |= {tokens[700]: 701, tokens[701]: 700}
    file.write_text(json.dumps(tokenizer))
    build(str(draft))
    assert not warnings, "two renamed tokens do no harm"
    tokenizer["model"]["vocab"] |= {tokens[700 + at]: 739 - at for at in range(40)}
    file.write_text(json.dumps(tokenizer))
    build(str(draft))
    words = f"40 differ, 700 is {tokens[739]!r} and {tokens[700]!r}, 701 is {tokens[738]!r}"
    assert [words in one for one in warnings] == [True]
    tokenizer["model"] = {"type": "Unigram", "vocab": [[tokens[number], 0.0] for number in sorted(tokens)]}
    for text in (json.dumps(tokenizer), "no JSON", json.dumps({"model": {}})):
        file.write_text(text)
        build(str(draft))
    assert len(warnings) == 1, "the same tokens in another format, and files that say nothing"


def test_a_draft_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors list the served drafts, and the meaning of `mtp` if it is no model's name."""

    def read(*_: Any) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(registry.Checkpoint, "read", read)
    for model, also in (("mtp", r", or tree: {\"draft\": \"mtp\"} for the target's own MTP layers"), ("mine", "")):
        with pytest.raises(
            ValueError, match=rf"at '{model}'; .* config.json{also} \(OSError: .*\); this release drafts"
        ):
            build(model)
