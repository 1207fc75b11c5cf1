"""The table of target classes in the docs is the one that the checks have, and each line has its test."""

from tests.engine.families import COMMON
from tests.engine.families import FAMILIES as MODELS
from tools.families import FILE, written
from vllm_adaptive_tree.engine.targets.families import FAMILIES


def test_the_page_has_the_table_of_today() -> None:
    text = FILE.read_text()
    assert written(text) == text, "run `python -m tools.families`"


def test_every_class_has_a_model_and_every_model_a_class() -> None:
    named = [name for family in FAMILIES for name in family.tests]
    assert sorted(named) == sorted(MODELS)
    assert len({family.architecture for family in FAMILIES}) == len(FAMILIES)


def test_models_are_of_the_class_that_they_prove() -> None:
    for family in FAMILIES:
        kind = family.architecture.split("For")[0]
        for name in family.tests:
            model = MODELS[name]
            built = model.sees.name if model.sees else model.config.removesuffix("Config").removesuffix("Text")
            assert built.replace("_", "") == kind.replace("_", ""), (name, family.architecture)


def test_sizes_of_heads_and_groups_are_all_there() -> None:
    """MQA, groups of query heads for each K/V head, and MHA."""
    sizes, groups = set[int](), set[int]()
    for model in MODELS.values():
        fields = {**COMMON, **model.fields}
        heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        sizes.add(fields.get("head_dim", fields["hidden_size"] // heads))
        groups.add((kv_heads > 1) + (kv_heads == heads))
    assert sizes >= {32, 64, 80, 96, 128, 256}
    assert groups == {0, 1, 2}
