"""Prompts by kind of text: of held-out modules alone, and what `vllm bench serve` reads."""

import json

import pytest

from benchmarks.speed_split import LONGEST, splits, write
from examples.train_demo_pair import documents, is_held_out

HELD_OUT = [text for name, text in documents().items() if is_held_out(name)]


def held_out(text: str) -> bool:
    return any(text in one for one in HELD_OUT)


@pytest.fixture(scope="module")
def kinds() -> dict[str, list[str]]:
    return splits(24)


def test_of_every_kind_as_many_and_no_two_alike(kinds):
    assert set(kinds) == {"code", "prose", "JSON", "copies", "edits"}
    for prompts in kinds.values():
        assert len({*prompts}) == len(prompts) == 24
        assert all(10 < len(one) <= LONGEST for one in prompts)
    assert splits(24) == kinds
    assert splits(24, seed=1) != kinds
    with pytest.raises(ValueError, match=r"\d+ prompts of kind '\w+' are held out, fewer than 5000: ask for less"):
        splits(5000)


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_text_that_goes_on(kinds, kind):
    assert all(held_out(prompt) for prompt in kinds[kind])
    assert kind == "code" or all(prompt.count('"""') + prompt.count("'''") == 1 for prompt in kinds[kind])


def test_functions_once_more(kinds):
    for prompt in kinds["copies"]:
        again = prompt.rindex(prompt.splitlines()[0])
        assert held_out(prompt[:again].rstrip("\n"))
        assert prompt.startswith(prompt[again:]), "what comes next is known"
    for prompt in kinds["edits"]:
        before, _, head = prompt.partition(" is called data here\n")
        own, _, name = before.rpartition("\n# ")
        assert held_out(own.rstrip("\n"))
        assert name in own
        assert "data" in head
        assert head not in own


def test_records(kinds):
    names = {name for name in documents() if is_held_out(name)}
    for prompt in kinds["JSON"]:
        whole, _, begun = prompt.rpartition(",\n")
        records = json.loads(f"{whole}]")
        assert len(records) == 4
        assert {record["module"] for record in records} <= names
        assert begun == ' {"module": "'


def test_datasets_of_the_server_benchmark(kinds, tmp_path):
    write(tmp_path / "split", kinds)
    rows = {file.stem: [json.loads(line) for line in file.open()] for file in (tmp_path / "split").iterdir()}
    assert set(rows) == {"code", "prose", "json", "copies", "edits", "all"}
    assert rows["code"] == [{"prompt": prompt} for prompt in kinds["code"]]
    assert [row["prompt"] for row in rows["all"][:5]] == [prompts[0] for prompts in kinds.values()]
    assert len(rows["all"]) == 5 * 24
