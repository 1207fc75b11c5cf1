"""The table of target classes in the docs is the one that the checks have, and each line has its test."""

from tests.engine.families import FAMILIES as MODELS
from tools.families import FILE, written
from vllm_adaptive_tree.engine.families import FAMILIES


def test_the_page_has_the_table_of_today() -> None:
    text = FILE.read_text()
    assert written(text) == text, "run `python -m tools.families`"


def test_every_class_has_a_model_and_every_model_a_class() -> None:
    named = [name for family in FAMILIES for name in family.tests]
    assert sorted(named) == sorted(MODELS)
    assert len({family.architecture for family in FAMILIES}) == len(FAMILIES)


def test_models_are_of_the_class_that_they_prove() -> None:
    for family in FAMILIES:
        kind = family.architecture.removesuffix("ForCausalLM")
        for name in family.tests:
            built = MODELS[name].config.removesuffix("Config").removesuffix("Text")
            assert built == kind, (name, family.architecture)
