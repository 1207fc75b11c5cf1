"""A kind of draft in one file of a third party: recognised and checked. test_registry.py serves one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.config.checkpoints import build
from tests.config.distilled import Distilled
from tests.engine.engines import DRAFT
from vllm_adaptive_tree import register
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import DRAFT_KINDS
from vllm_adaptive_tree.engine.drafts import DraftKind
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.startup.finish import tree_options


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DRAFT_KINDS, "registered", {})


def distilled(folder: Path, teacher: str = "target") -> str:
    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "distilled_from": teacher}))
    return str(folder)


@pytest.mark.parametrize("said", [None, "distilled"])
def test_it_recognises_and_checks_its_checkpoints(said: str | None, tmp_path: Path) -> None:
    fits, other = distilled(tmp_path / "fits"), distilled(tmp_path / "other", "gpt2")
    assert tree_options(build(fits)).draft == "model", "it is not registered yet"
    register("distilled", Distilled)
    assert tree_options(build(fits, said)).draft == "distilled"
    with pytest.raises(ValueError, match="was distilled from 'gpt2'; use a draft of"):
        build(other, said)
    assert tree_options(build(DRAFT)).draft == "model"


def test_another_process_knows_it_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register("distilled", "tests.config.distilled:Distilled")
    options = tree_options(build(distilled(tmp_path / "draft"), "distilled"))
    monkeypatch.setattr(DRAFT_KINDS, "registered", {})
    kind = kind_in(TreeOptions.from_json(json.loads(json.dumps(options.to_json()))))
    assert (kind.name, kind.title) == ("distilled", "a distilled model")


def test_names_and_classes_that_are_refused() -> None:
    for name in ("eagle3", "ngram"):
        with pytest.raises(ValueError, match="is built in"):
            register(name, Distilled)
    with pytest.raises(ValueError, match=r"is no kind of draft: derive it from .*engine\.drafts\.DraftKind"):
        DRAFT_KINDS.load("vllm_adaptive_tree.drafters.ngram:NGram")
    register("distilled", Distilled)
    with pytest.raises(ValueError, match=r"\['draft'\] must be one of model, .*, xpress, distilled, ngram, suffix"):
        build(DRAFT, "other")


class Unfinished(DraftKind):
    title = "an unfinished kind"


class Idle(Distilled):
    proposer = speculator = None


class Elsewhere(Distilled):
    proposer = "tests.config.distilled:Nothing"


class Deep(Distilled):
    def levels(self, draft: Any) -> Any:
        return "three"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Idle, "has neither 'proposer' nor 'speculator'"),
        (Elsewhere, "'tests.config.distilled:Nothing' cannot be imported here"),
        (Deep, "whose kind gives it 'three' levels"),
    ],
)
def test_kinds_that_cannot_run(kind: type[DraftKind], error: str, tmp_path: Path) -> None:
    register("distilled", kind)
    with pytest.raises(ValueError, match=error):
        build(distilled(tmp_path / "draft"))


def test_a_kind_without_a_method() -> None:
    with pytest.raises(ValueError, match="is no kind of draft yet: it does not define method"):
        register("unfinished", Unfinished)


def test_a_key_that_is_false_is_no_sign(tmp_path: Path) -> None:
    register("distilled", Distilled)
    folder = Path(distilled(tmp_path / "draft"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "distilled_from": False}))
    assert tree_options(build(str(folder))).draft == "model"
