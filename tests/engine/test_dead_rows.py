"""A draft that says NaN or infinity of some nodes: the same tokens, other requests keep their trees, and it is counted.

The last two steps of Model Runner V2 are not counted yet when its last request ends.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, V2, Engines, assert_identical, generate, metric, runner_of
from tests.engine.heads import VOCABULARY, eagle3
from tests.engine.leaning import lean, second_best
from vllm_adaptive_tree.drafters import Rows

TEXTS = [PROMPTS[i] for i in (0, 4, 2, 9, 3, 1)]
TOKEN = "self"
DEAD = "adaptive_tree_dead_draft_rows"
METHODS: dict[str, dict[str, Any]] = {  # of each growth; trees of children of every way to draw them
    "opt_tree": {},
    "dyspec": {},
    "eagle2": {"budget": None},
    "static_tree": {"children": "without_replacement"},
    "mcsd": {"budget": None, "shape": [2, 2, 1]},
    "opt_tree of a head": {"draft": "eagle3"},
}


def parameters(index: int) -> SamplingParams:
    kind: dict[str, Any] = {"temperature": 0} if index % 3 < 2 else {"temperature": 0.8, "seed": index}
    return SamplingParams(max_tokens=16 + index, ignore_eos=True, logprobs=2, **kind)


ALL = [parameters(index) for index in range(len(TEXTS))]
SPOILED = [(1, math.nan, None), (0, math.inf, None), (2, -math.inf, 0), (1, math.nan, 1)]
"""Prompt, what its logits hold, and where: in a column of every level, or at the root."""
SAMPLED = SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(), TEXTS, ALL)


@pytest.fixture
def llm(engines: Engines, plain: list[Any], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Under a budget that asks for every node's chance and never rests. A head agrees with what is known of the
    target."""
    options = {"budget": 100, **METHODS[method]}
    model = eagle3(tmp_path / "head") if "draft" in options else DRAFT
    name = method.partition(" ")[0]
    llm = engines.start({"method": name, "model": model, "num_speculative_tokens": 7 if V2 else 12, "tree": options})
    if "draft" in options:
        prompts = llm.get_tokenizer()(TEXTS).input_ids
        known = [(prompt, output.token_ids) for prompt, output in zip(prompts, plain, strict=True)]
        lean(runner_of(llm), second_best(known, VOCABULARY), monkeypatch.setattr)
    return llm


class Nodes:
    """Verified nodes of every prompt of the next call of `generate`."""

    def __init__(self, llm: Any, patch: pytest.MonkeyPatch):
        self.count: dict[int, int] = {}
        runner, name = runner_of(llm), "sample" if V2 else "_sample"
        original = getattr(runner, name)

        def sample(*args: Any) -> Any:
            names = args[1].req_ids if V2 else runner.input_batch.req_ids
            sizes = dict.fromkeys(range(len(names)), 0)
            if (verification := runner.step.verification) is not None:
                trees = dict(enumerate(verification.tree.valid.sum(1).tolist())) if V2 else verification.trees
                sizes |= trees if V2 else {row: len(tree) for row, tree in trees.items()}
            for row, size in sizes.items():
                number = int(names[row].partition("-")[0])
                self.count[number] = self.count.get(number, 0) + size
            return original(*args)

        patch.setattr(runner, name, sample)

    @property
    def by_prompt(self) -> list[int]:
        return [count for _, count in sorted(self.count.items())]


def blind(llm: Any, value: float, patch: pytest.MonkeyPatch) -> None:
    """The draft's embedding of one token holds `value`, and so do that token's hidden states, keys and values."""
    runner = runner_of(llm)
    drafter = runner.speculator if V2 else runner.drafter
    (token,) = llm.get_tokenizer().encode(TOKEN, add_special_tokens=False)
    model = drafter.model.model
    original = model.embed_input_ids  # a head shares the target's table

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = original(tokens)
        return found.masked_fill((tokens == token)[:, None], value)

    patch.setattr(model, "embed_input_ids", embed)


class Spoiler:
    """Rows of the V1 drafter for one request, by its prompt, of which some are dead."""

    def __init__(self, llm: Any, prompt: str, patch: pytest.MonkeyPatch, *, value: float, column: int | None):
        """`column`: of every level behind the roots; None: the root itself."""
        runner = runner_of(llm)
        catch_up, grow = runner.drafter.catch_up, runner.drafter.grow
        wanted = llm.get_tokenizer().encode(prompt)
        self.row: int | None = None  # among the rooted requests of this step

        def spoil(rows: Rows, at: int) -> None:
            if self.row is not None and rows.logits.shape[1] > at:
                rows.logits[self.row, at, slice(None) if value < 0 else 7] = value

        def caught_up(items: list[Any], *args: Any) -> tuple[Rows, Any]:
            rows, state = catch_up(items, *args)
            prompts = [
                runner.requests[runner.input_batch.req_ids[one.row]].prompt_token_ids
                for one in items
                if one.root is not None
            ]
            self.row = prompts.index(wanted) if wanted in prompts else None
            if column is None:
                spoil(rows, 0)
            return rows, state

        def grown(*args: Any) -> tuple[Rows, Any]:
            rows, state = grow(*args)
            if column is not None:
                spoil(rows, column)
            return rows, state

        patch.setattr(runner.drafter, "catch_up", caught_up)
        patch.setattr(runner.drafter, "grow", grown)


@pytest.mark.parametrize("method", ["opt_tree", "dyspec"] if V2 else METHODS)
def test_dead_rows(llm: Any, plain: list[Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (math.nan, math.inf):
        before = metric(llm, DEAD)
        with monkeypatch.context() as patch:
            blind(llm, value, patch)
            nodes = Nodes(llm, patch)
            assert_identical(plain, generate(llm, TEXTS, ALL))
        assert min(nodes.by_prompt) > 0, "a token that cannot be read spoils no other's row"
        assert metric(llm, DEAD) > before
        llm.reset_prefix_cache()
    for bad, value, column in SPOILED if not V2 else ():
        before = metric(llm, DEAD)
        with monkeypatch.context() as patch:
            Spoiler(llm, TEXTS[bad], patch, value=value, column=column)
            nodes = Nodes(llm, patch)
            assert_identical(plain, generate(llm, TEXTS, ALL))
            for one in generate(llm, TEXTS, SAMPLED):
                assert len(one.token_ids) == SAMPLED.max_tokens
        without = [index for index, count in enumerate(nodes.by_prompt[: len(TEXTS)]) if count == 0]
        assert without == ([bad] if column is None else [])
        assert metric(llm, DEAD) - before > 3
    dead = metric(llm, DEAD)
    assert_identical(plain, generate(llm, TEXTS, ALL))
    assert metric(llm, DEAD) == dead, "nothing of it is left in caches and contexts"
    assert metric(llm, "spec_decode_num_accepted_tokens") > 30
