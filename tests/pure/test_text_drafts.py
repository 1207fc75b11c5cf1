"""Drafts without a checkpoint: what they find in a text, against plain loops."""

import random

import pytest
import torch

from tests import suffix_trees
from vllm_adaptive_tree.drafters import DRAFTERS, Texts
from vllm_adaptive_tree.drafters.ngram import LENGTH, LONGER, MATCHES, NOTHING, NGram
from vllm_adaptive_tree.drafters.ngram_cpu import NGramCPU
from vllm_adaptive_tree.drafters.suffix import Suffix, SuffixOptions

VOCABULARY = 5


def texts(*tokens: list[int], prompt: int = 1, name: str = "request") -> Texts:
    longest = max(map(len, tokens)) + 2
    padded = torch.tensor([one + [random.randrange(VOCABULARY) for _ in range(longest - len(one))] for one in tokens])
    length = torch.tensor([len(one) for one in tokens])
    return Texts([f"{name} {at}" for at in range(len(tokens))], padded, length, torch.full_like(length, prompt))


def occurrences(text: list[int], shortest: int, longest: int) -> list[tuple[tuple[int, ...], float]]:
    """Continuations of earlier occurrences of the text's end: the longest matches, of these the latest."""
    found = []
    for start in range(1, len(text)):
        common = 0
        while common < min(longest, start) and text[start - 1 - common] == text[-1 - common]:
            common += 1
        if common >= shortest:
            found.append((common, start))
    found = sorted(found, reverse=True)[:MATCHES]
    total = NOTHING * LONGER + sum(LONGER**common for common, _ in found)
    return [(tuple(text[start : start + LENGTH]), pytest.approx(LONGER**common / total)) for common, start in found]


@pytest.mark.parametrize("draft", [NGram, NGramCPU])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 4), (2, 3), (1, 1), (3, 8)])
def test_occurrences(shortest: int, longest: int, draft: type[NGram]) -> None:
    random.seed(shortest)
    some = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (1, 2, 3, 7, 30, 90)]
    batch = texts(*some)
    tokens, weight = draft(VOCABULARY, shortest, longest).continuations(batch)
    for text, rows, values in zip(some, tokens.tolist(), weight.tolist(), strict=True):
        found = [
            (tuple(token for token in row if token >= 0), value)
            for row, value in zip(rows, values, strict=True)
            if value > 0
        ]
        assert found == occurrences(text, shortest, longest)
        assert all(token == -1 for row, value in zip(rows, values, strict=True) if value == 0 for token in row)


def test_the_roots_rows_are_the_weights_of_the_next_tokens() -> None:
    draft = DRAFTERS.load("vllm_adaptive_tree.drafters.ngram:NGram")
    rows, state = draft.build(draft.Options(), vocabulary=VOCABULARY).begin(texts([1, 2, 3, 1, 2, 4, 0, 2], [0, 1, 2]))
    assert rows.dead is not None
    assert rows.dead.tolist() == [[False], [True]]
    assert rows.logits[0, 0].softmax(0).tolist() == pytest.approx([0, 0, 0, 0.5, 0.5])
    node = torch.tensor([[3], [-1]])
    below, _ = draft.build(draft.Options(), vocabulary=VOCABULARY).grow(node, torch.zeros_like(node), state)
    assert below.logits[0, 0].softmax(0).tolist() == pytest.approx([0, 1, 0, 0, 0])


@pytest.mark.parametrize("draft", [NGram, NGramCPU])
def test_long_matches_keep_their_weights(draft: type[NGram]) -> None:
    text = list(range(5)) * 40
    tokens, weight = draft(VOCABULARY, 1, 100).continuations(texts(text))
    assert weight.isfinite().all()
    assert 0.99 < weight.sum() <= 1
    assert tokens[0, 0, :3].tolist() == [0, 1, 2]


def test_a_minimum_above_the_maximum() -> None:
    with pytest.raises(ValueError, match="must be at most 'prompt_lookup_max', got 5 and 4"):
        NGram.Options(prompt_lookup_min=5)


class TestSuffix:
    def test_answers_of_past_requests(self) -> None:
        suffix_trees.require()
        draft = Suffix.build(SuffixOptions(), vocabulary=9)
        first = [1, 2, 3, 4, 5, 6]
        assert self.tree(draft, first, prompt=1) == {}, "nothing has come twice"
        draft.forget(["request 0"])
        assert self.tree(draft, [7, 8, 2, 3, 4], prompt=2, name="another") == {(5,): 1.0, (5, 6): 1.0}

    def test_weights_are_those_of_the_library(self) -> None:
        suffix_trees.require()
        draft = Suffix.build(SuffixOptions(suffix_decoding_max_spec_factor=4.0), vocabulary=9)
        text = [1, 2, 3, 4, 0, 1, 2, 3, 5, 6, 1, 2, 3, 5, 7, 1, 2]  # a 3 three times, then twice a 5
        found = self.tree(draft, text, prompt=len(text))
        expected = {(3,): 1, (3, 5): 2 / 3, (3, 4): 1 / 3, (3, 5, 6): 1 / 3, (3, 5, 7): 1 / 3, (3, 4, 0): 1 / 3}
        assert {path: prob for path, prob in found.items() if len(path) < 4} == pytest.approx(expected)
        more = self.tree(draft, [*text, 3], prompt=len(text))
        assert more[(5,)] == pytest.approx(2 / 3), "the request goes on"

    def tree(self, draft: Suffix, text: list[int], prompt: int, name: str = "request") -> dict[tuple[int, ...], float]:
        """Probability of every path, read as an engine reads it: level by level."""
        rows, state = draft.begin(texts(text, prompt=prompt, name=name))
        paths: dict[tuple[int, ...], float] = {}
        level, slots, used = [((), 1.0)], [0], 1
        while level:
            children = []
            for column, (path, prob) in enumerate(level):
                law = rows.logits[0, column].softmax(0)
                for token in range(draft.vocabulary):
                    if rows.dead is not None and not rows.dead[0, column] and law[token] > 0:
                        children.append(((*path, token), prob * float(law[token]), slots[column]))
            if not children:
                break
            paths |= {path: prob for path, prob, _ in children}
            tokens = torch.tensor([[path[-1] for path, _, _ in children]])
            rows, state = draft.grow(tokens, torch.tensor([[slot for _, _, slot in children]]), state)
            level = [(path, prob) for path, prob, _ in children]
            slots = list(range(used, used + len(level)))
            used += len(level)
        return paths
