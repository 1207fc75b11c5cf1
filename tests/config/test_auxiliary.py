"""Layers of the target that a head reads: every reader of vLLM finds them, on both model runners."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.qwen3_dflash import _get_dflash_fc_input_size
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.config.checkpoints import (
    DFLASH_TENSORS,
    DSPARK_TENSORS,
    EAGLE3,
    EAGLE3_TENSORS,
    Shapes,
    build,
    speculators,
    written,
)
from tests.engine.heads import CONFIG, DFLASH, FOUR, HIDDEN, ON_V1
from vllm_adaptive_tree.engine.targets import auxiliary
from vllm_adaptive_tree.heads import checkpoint
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head

IDS = "eagle_aux_hidden_state_layer_ids"
WIDE: Shapes = {**EAGLE3_TENSORS, "fc.weight": (HIDDEN, 4 * HIDDEN)}
WIDE_PEAGLE: Shapes = {**WIDE, "mask_hidden": (1, 1, 4 * HIDDEN)}
PEAGLE = {**EAGLE3, "architectures": ["PEagleDraftModel"], "ptd_token_id": 0, "num_depths": 5}
BLOCK = {key: value for key, value in DFLASH.items() if key != "dflash_config"} | {"mask_token_id": 0}
DSPARK = {**BLOCK, "architectures": ["Qwen3DSparkModel"], "markov_rank": 16}
SAID: dict[str, tuple[dict[str, Any], Shapes, list[int]]] = {
    "EAGLE-3, at the top": ({**EAGLE3, IDS: FOUR}, WIDE, FOUR),
    "EAGLE-3, in eagle_config": ({**EAGLE3, "eagle_config": {IDS: FOUR}}, WIDE, FOUR),
    "EAGLE-3, in both": ({**EAGLE3, IDS: FOUR, "eagle_config": {IDS: FOUR}}, WIDE, FOUR),
    "EAGLE-3, another number of states": ({**EAGLE3, IDS: FOUR, "num_aux_hidden_states": 3}, WIDE, FOUR),
    "EAGLE-3 of Qwen3": (
        {**EAGLE3, "model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"], "eagle_config": {IDS: FOUR}},
        WIDE,
        FOUR,
    ),
    "EAGLE-3 of speculators": (speculators("eagle3", **{IDS: FOUR}), WIDE, FOUR),
    "EAGLE-3 of speculators, DFlash's name": (speculators("eagle3", aux_hidden_state_layer_ids=FOUR), WIDE, FOUR),
    "P-EAGLE": ({**PEAGLE, IDS: FOUR}, WIDE_PEAGLE, FOUR),
    "P-EAGLE, in eagle_config": ({**PEAGLE, "eagle_config": {IDS: FOUR}}, WIDE_PEAGLE, FOUR),
    "P-EAGLE of speculators": (
        speculators("peagle", **{IDS: FOUR}),
        WIDE_PEAGLE,
        FOUR,
    ),
    "DFlash, in dflash_config": (DFLASH, DFLASH_TENSORS, [3, 6]),
    "DFlash, at the top": ({**BLOCK, "target_layer_ids": [0, 4]}, DFLASH_TENSORS, [1, 5]),
    "DFlash, as EAGLE-3": ({**BLOCK, IDS: [1, 5]}, DFLASH_TENSORS, [1, 5]),
    "DFlash of speculators": (
        speculators("dflash", block_size=8, aux_hidden_state_layer_ids=[1, 5]),
        DFLASH_TENSORS,
        [1, 5],
    ),
    "DSpark, at the top": ({**DSPARK, "target_layer_ids": [0, 4]}, DSPARK_TENSORS, [1, 5]),
    "DSpark, DeepSeek's name": ({**DSPARK, "dspark_target_layer_ids": [0, 4]}, DSPARK_TENSORS, [1, 5]),
    "DSpark of speculators": (
        speculators("dspark", block_size=8, markov_rank=16, aux_hidden_state_layer_ids=[1, 5]),
        DSPARK_TENSORS,
        [1, 5],
    ),
}


def found(config: Any) -> list[list[int]]:
    """The layers that Model Runner V1 and V2 take from a head's configuration."""
    spec = config.speculative_config
    readers = (GPUModelRunner._get_eagle3_aux_layers_from_config(SimpleNamespace(speculative_config=spec)),)
    return [list(ids or ()) for ids in (*readers, get_eagle3_aux_layers_from_config(spec))]


@pytest.mark.parametrize("which", [pytest.param(one, marks=[ON_V1] * ("P-EAGLE" in one)) for one in SAID])
def test_every_reader_of_vllm_finds_the_layers(which: str, tmp_path: Path) -> None:
    """The classes of heads of Llamas take their number from `eagle_config` alone, unless there is another key."""
    said, tensors, ids = SAID[which]
    config = build(written(tmp_path / "draft", said, tensors))
    assert found(config) == [ids, ids]
    head = config.speculative_config.draft_model_config.hf_config
    assert head.num_aux_hidden_states == head.num_aux_layers == len(head.eagle_config[IDS]) == len(ids)
    if "block_size" in said:
        assert _get_dflash_fc_input_size(config) == tensors["fc.weight"][1]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {IDS: [1, 3, 5], "eagle_config": {IDS: [2, 4, 5]}},
            [f"[1, 3, 5] by {IDS} ", f"[2, 4, 5] by eagle_config.{IDS}"],
        ),
        ({IDS: "1 3 5"}, [f"names no layers by {IDS} '1 3 5'", "a list of whole numbers"]),
        ({"eagle_config": {IDS: [1.0, 3, 5]}}, [f"by eagle_config.{IDS} [1.0, 3, 5]"]),
        (
            {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
            ["has norm_before_fc True by eagle_config.norm_before_fc", "False by norm_before_fc"],
        ),
    ],
)
def test_what_a_head_says_twice_or_wrongly(said: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"speculative_config\['model'\]: ") as error:
        build(written(tmp_path / "draft", {**EAGLE3, **said}, EAGLE3_TENSORS))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("nested", [False, True])
def test_keys_of_eagle_3_1(nested: bool, tmp_path: Path) -> None:
    """vLLM reads `norm_before_fc` in both places, the other norms at the top alone, `use_aux_hidden_state` in
    `eagle_config` alone."""
    keys = {"norm_before_fc": True, "norm_output": True, "fc_norm": False, "norm_before_residual": True}
    said = {"eagle_config": {IDS: FOUR, **keys}} if nested else {IDS: FOUR, **keys}
    head = build(written(tmp_path / "draft", {**EAGLE3, **said}, WIDE)).speculative_config.draft_model_config.hf_config
    assert {key: getattr(head, key) for key in keys} == {key: head.eagle_config[key] for key in keys} == keys


def test_layers_that_are_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(auxiliary.logger, "warning", lambda text, *values: warnings.append(text % values))
    assert found(build(written(tmp_path / "silent", EAGLE3, EAGLE3_TENSORS))) == [[2, 4, 5], [2, 4, 5]]
    assert ["vLLM's guess is taken, [2, 4, 5] of 8" in one and IDS in one for one in warnings] == [True]
    build(written(tmp_path / "telling", {**EAGLE3, IDS: [2, 4, 5]}, EAGLE3_TENSORS))
    assert len(warnings) == 1


def test_a_trained_head_says_it_where_vllm_s_own_chains_look(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint.write(tmp_path / "head", Head(Dimensions.of(CONFIG), 4), CONFIG, FOUR, None)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config[IDS] == config["eagle_config"][IDS] == FOUR
