"""Every kind of checkpoint, under a plain and a misleading path: what it is taken for, and what is refused with what
words. No engine starts: the configuration is built, as for one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.config.checkpoints import (
    DFLASH,
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
from tests.engine.heads import CONFIG, HIDDEN, VOCABULARY
from vllm_adaptive_tree.engine import translate
from vllm_adaptive_tree.engine.startup.finish import tree_options

Make = Callable[[Path], str]
KINDS: dict[str, tuple[Make, str]] = {
    "an independent model": (lambda folder: written(folder, CONFIG, WHOLE), "model"),
    "EAGLE that says it is a Llama": (heads.eagle, "eagle"),
    "EAGLE with an architecture": (
        lambda folder: written(folder, {**SILENT, "architectures": ["EagleLlamaForCausalLM"]}, EAGLE_TENSORS),
        "eagle",
    ),
    "EAGLE, converted": (
        lambda folder: written(
            folder,
            {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "model": SILENT, **SILENT}
            | {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]},
            EAGLE_TENSORS,
        ),
        "eagle",
    ),
    "EAGLE-3": (heads.eagle3, "eagle3"),
    "EAGLE-3 of a reduced vocabulary": (lambda folder: heads.eagle3(folder, reduced=True), "eagle3"),
    "EAGLE-3 by its keys": (
        lambda folder: written(folder, {**SILENT, "draft_vocab_size": VOCABULARY}, EAGLE3_TENSORS),
        "eagle3",
    ),
    "EAGLE-3 by its tensors": (lambda folder: written(folder, SILENT, EAGLE3_TENSORS), "eagle3"),
    "EAGLE-3 by the width of fc": (
        lambda folder: written(folder, SILENT, {"fc.weight": (HIDDEN, 3 * HIDDEN)}),
        "eagle3",
    ),
    "P-EAGLE": (heads.peagle, "peagle"),
    "P-EAGLE under the name of EAGLE-3": (
        partial(heads.peagle, architectures=["LlamaForCausalLMEagle3"], ptd_token_id=None, pard_token=0),
        "peagle",
    ),
    "P-EAGLE of speculators": (lambda folder: written(folder, speculators("peagle"), PEAGLE_TENSORS), "peagle"),
    "DFlash": (heads.dflash, "dflash"),
    "DFlash of speculators": (
        lambda folder: written(folder, speculators("dflash", block_size=8), DFLASH_TENSORS),
        "dflash",
    ),
    "DFlash2": (heads.dflash2, "dflash2"),
    "DFlash2 of speculators": (
        lambda folder: written(folder, speculators("dflash2", block_size=8, **heads.SELECTOR), DFLASH2_TENSORS),
        "dflash2",
    ),
    "LiLiCorr": (heads.lilicorr, "lilicorr"),
    "DSpark": (heads.dspark, "dspark"),
    "DSpark under its other name": (lambda folder: heads.dspark(folder, architectures=["DSparkDraftModel"]), "dspark"),
    "DSpark of speculators": (
        lambda folder: written(
            folder, speculators("dspark", block_size=8, markov_rank=16, markov_head_type="vanilla"), DSPARK_TENSORS
        ),
        "dspark",
    ),
    "EAGLE-3 of speculators": (
        lambda folder: written(
            folder, speculators("eagle3"), {"fc.weight": (HIDDEN, 3 * HIDDEN), "layers.0.hidden_norm.weight": (HIDDEN,)}
        ),
        "eagle3",
    ),
}

if heads.XPRESS:
    KINDS["XPress"] = heads.xpress, "xpress"


def on_v1(kind: str) -> list[Any]:
    return [heads.ON_V1] * (kind == "peagle")


@pytest.mark.parametrize("name", ["draft", "eagle3-dflash-eagle-"])
@pytest.mark.parametrize("said", [False, True], ids=["told", "said"])
@pytest.mark.parametrize("which", [pytest.param(one, marks=on_v1(kind)) for one, (_, kind) in KINDS.items()])
def test_what_a_checkpoint_is_taken_for(which: str, said: bool, name: str, tmp_path: Path) -> None:
    make, kind = KINDS[which]
    draft = make(tmp_path / name)
    config = build(draft, kind if said else None)
    spec = config.speculative_config
    assert tree_options(config).draft == kind
    assert spec.method == {"model": "draft_model"}.get(kind, kind if kind == "eagle" else "eagle3")
    assert spec.model == spec.draft_model_config.model == draft
    assert spec.num_speculative_tokens == 60, "the scheduler's are nodes"
    block = json.loads(Path(draft, "config.json").read_text()).get("block_size", 1)
    assert config.num_lookahead_tokens == block
    assert config.num_prefill_lookahead_tokens == (0 if kind == "model" else 1)
    assert spec.max_num_new_slots_for_drafting == (1 if kind == "model" else 0)


LEVELS: list[tuple[Make, int | None, str]] = [
    (heads.peagle, heads.DEPTH, "peagle"),
    (lambda folder: written(folder, speculators("peagle"), PEAGLE_TENSORS), 3, "peagle"),
    (lambda folder: written(folder, speculators("peagle", num_depths=8), PEAGLE_TENSORS), 8, "peagle"),
    (heads.dflash, heads.DEPTH, "dflash"),
    (partial(heads.dflash, block_size=16), 15, "dflash"),
    (heads.dflash2, heads.DEPTH, "dflash2"),
    (heads.lilicorr, heads.DEPTH, "lilicorr"),
    (heads.dspark, heads.DEPTH, "dspark"),
    (partial(heads.dspark, sample_from_anchor=False), heads.DEPTH - 1, "dspark"),
    (lambda folder: written(folder, speculators("dspark", block_size=8, markov_rank=16), DSPARK_TENSORS), 7, "dspark"),
    (heads.eagle3, None, "eagle3"),
    *([(heads.xpress, heads.DEPTH, "xpress")] if heads.XPRESS else []),
]


@pytest.mark.parametrize(("make", "levels", "kind"), [pytest.param(*one, marks=on_v1(one[2])) for one in LEVELS])
def test_levels_are_the_checkpoint_s(make: Make, levels: int | None, kind: str, tmp_path: Path) -> None:
    """Whatever the number of nodes."""
    assert tree_options(build(make(tmp_path / "draft"))).levels == levels


REMOVED = "Medusa heads, which vLLM 0.33 has removed"
REFUSED: dict[str, tuple[dict[str, Any], Shapes, list[str]]] = {
    "Medusa": (
        {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN},
        {"blocks.0.layers.0.weight": (HIDDEN, HIDDEN)},
        [REMOVED, "model_type 'medusa'"],
    ),
    "Medusa's own files": (
        {"medusa_num_heads": 1, "hidden_size": HIDDEN},
        {"0.0.linear.weight": (HIDDEN, HIDDEN)},
        [REMOVED, "medusa_num_heads"],
    ),
    "Medusa's tensors": (SILENT, {"0.0.linear.weight": (HIDDEN, HIDDEN)}, [REMOVED, "'0.0.linear.weight'"]),
    "an MLP speculator": (
        {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]},
        {"speculator.emb.0.weight": (VOCABULARY, HIDDEN)},
        ["an MLP speculator", "model_type"],
    ),
    "MTP of speculators": (speculators("mtp"), {}, ["of a kind that is not known", "'mtp'"]),
    "nothing that is known": (
        SILENT,
        {"layers.0.mlp.up_proj.weight": (8, 8), "lm_head.weight": (8, 8)},
        ["of a kind that is not known", "no token embedding among its tensors (layers.0.mlp"],
    ),
}


@pytest.mark.parametrize("name", ["draft", "eagle3"])
@pytest.mark.parametrize("said", [None, "eagle3"])
@pytest.mark.parametrize("which", REFUSED)
def test_kinds_that_are_not_served(which: str, said: str | None, name: str, tmp_path: Path) -> None:
    config, tensors, words = REFUSED[which]
    with pytest.raises(ValueError, match=r"\['model'\]: .*, not served; this release drafts with") as error:
        build(written(tmp_path / name, config, tensors), said)
    assert all(word in str(error.value) for word in (*words, "EAGLE-3 or P-EAGLE head", "'ngram'")), error.value


CONTRADICTIONS: dict[str, tuple[dict[str, Any], Shapes, str | None, list[str]]] = {
    "said eagle, tensors of eagle3": (SILENT, EAGLE3_TENSORS, "eagle", ["'eagle'", "EAGLE-3 head", "midlayer"]),
    "said eagle3, tensors of eagle": (SILENT, EAGLE_TENSORS, "eagle3", ["'eagle3'", "EAGLE head", "[256, 512]"]),
    "said dflash, tensors of dspark": (SILENT, DSPARK_TENSORS, "dflash", ["'dflash'", "a DSpark head", "markov_w1"]),
    "config of dflash, tensors of dspark": (
        {**ONE_LAYER, **DFLASH, "architectures": ["DFlashDraftModel"]},
        DSPARK_TENSORS,
        None,
        ["'DFlashDraftModel'", "a DSpark head", "markov_w1", "correct the config.json"],
    ),
    "config of dflash, tensors of dflash2": (
        {**ONE_LAYER, **DFLASH, "architectures": ["DFlashDraftModel"]},
        DFLASH2_TENSORS,
        None,
        ["'DFlashDraftModel'", "a DFlash2 head", "candidate_selector", "correct the config.json"],
    ),
    "said model, tensors of eagle": (SILENT, EAGLE_TENSORS, "model", ["'model'", "EAGLE head", "fc.weight"]),
    "said eagle, tensors of a model": (CONFIG, WHOLE, "eagle", ["'eagle'", "independent model", "token embedding"]),
    "said eagle, architecture of eagle3": (EAGLE3, {}, "eagle", ["'eagle'", "EAGLE-3 head", "LlamaForCausalLMEagle3"]),
    "architecture of eagle3, tensors of P-EAGLE": (
        EAGLE3,
        PEAGLE_TENSORS,
        None,
        ["'LlamaForCausalLMEagle3'", "a P-EAGLE head", "'mask_hidden'", "correct the config.json"],
    ),
    "said mtp, architecture of eagle3": (EAGLE3, EAGLE3_TENSORS, "mtp", ["'mtp'", "EAGLE-3 head"]),
    "config of eagle3, tensors of eagle": (
        EAGLE3,
        EAGLE_TENSORS,
        None,
        ["LlamaForCausalLMEagle3", "[256, 512]", "correct the config.json"],
    ),
    "config of eagle, tensors of a model": (
        {**SILENT, "architectures": ["EagleLlamaForCausalLM"]},
        WHOLE,
        None,
        ["EagleLlamaForCausalLM", "independent model", "correct the config.json"],
    ),
    "keys of eagle3, tensors of eagle": (
        {**SILENT, "draft_vocab_size": VOCABULARY},
        EAGLE_TENSORS,
        None,
        ["draft_vocab_size", "EAGLE head", "give the kind in 'tree' as 'draft'"],
    ),
}


@pytest.mark.parametrize("which", CONTRADICTIONS)
def test_contradictions_name_both_facts(which: str, tmp_path: Path) -> None:
    config, tensors, said, words = CONTRADICTIONS[which]
    with pytest.raises(ValueError, match="speculative_config") as error:
        build(written(tmp_path / "draft", config, tensors), said)
    assert all(word in str(error.value) for word in words), error.value


def test_what_is_said_settles_what_the_keys_leave_open(tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", {**SILENT, "draft_vocab_size": VOCABULARY}, EAGLE_TENSORS)
    assert build(draft, "eagle").speculative_config.method == "eagle"


def test_the_kind_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(translate.logger, "info", lambda text, *values: lines.append(text % values))
    draft = heads.eagle(tmp_path / "eagle3")
    build(draft)
    assert [f"draft {draft} (an EAGLE head)" in line for line in lines] == [True]
