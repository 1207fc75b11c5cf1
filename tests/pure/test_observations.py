"""Observations of a target: what is kept of them, in which precision, and how often the target is asked."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_adaptive_tree.heads import observations
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head
from vllm_adaptive_tree.heads.observations import Law, Observations, Observer
from vllm_adaptive_tree.heads.training import HeadRecipe, Teacher, Training

VOCABULARY, LAYERS = 60, (0, 2)


@pytest.fixture(scope="module")
def target() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, intermediate_size=48, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Counting(Observer):
    asked = 0

    def __call__(self, tokens: torch.Tensor) -> Any:
        self.asked += len(tokens)
        return super().__call__(tokens)


def test_the_rest_of_a_law_is_one_event(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "TOP", 4)
    draft_ids, tokens = torch.arange(0, VOCABULARY, 2), torch.randint(VOCABULARY, (2, 7))
    law = Observer(target, LAYERS, draft_ids)(tokens).law
    probs = target(tokens).logits.softmax(-1)[..., draft_ids]
    torch.testing.assert_close(law.probs.sum(-1) + law.rest, probs.sum(-1))
    assert law.probs.equal(law.probs.sort(-1, descending=True).values)
    logits = torch.randn(2, 7, len(draft_ids))
    q = logits.softmax(-1)
    expected = -(law.probs * q.gather(-1, law.ids.long()).log()).sum(-1)
    expected -= law.rest * (1 - q.gather(-1, law.ids.long()).sum(-1)).log()
    assert float(law.cross_entropy(logits)) == pytest.approx(float(expected.mean()), rel=1e-5)
    certain = Law(law.best, law.ids, torch.zeros_like(law.probs), torch.ones_like(law.rest))
    peaked = torch.full_like(logits, -1e4).scatter(-1, law.ids.long(), 1e4)
    assert certain.cross_entropy(peaked).isfinite(), "a head that leaves nothing to them"


def test_a_window_is_observed_once(target: Any, tmp_path: Path) -> None:
    windows = torch.randint(VOCABULARY, (6, 9))
    observer = Counting(target, LAYERS)
    kept = Observations(observer, windows, tmp_path)
    first = kept(torch.tensor([4, 1]))
    again = kept(torch.tensor([1, 4]))
    assert observer.asked == 2
    assert again[0].equal(windows[[1, 4]])
    for new, old in zip((*again[1].law, again[1].auxiliary), (*first[1].law, first[1].auxiliary), strict=True):
        assert new.flip(0).equal(old.bfloat16() if old.is_floating_point() else old)
    kept(torch.tensor([1, 2]))
    later = Observations(observer, windows, tmp_path)
    later(torch.tensor([0]))  # its files are opened with the first
    asked = observer.asked
    for new, old in zip(later(torch.tensor([1, 4]))[1].law, again[1].law, strict=True):
        assert new.equal(old)
    assert observer.asked == asked, "by a process before"


def test_what_has_no_space_is_observed_again(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = torch.randint(VOCABULARY, (6, 9))
    observer = Counting(target, LAYERS)
    one = observer(windows[:1])
    size = sum(part.numel() * (2 if part.is_floating_point() else 4) for part in (*one.law, one.auxiliary))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 2 * 3 * size))
    kept, observer.asked = Observations(observer, windows, tmp_path), 0
    for _ in range(2):
        tokens, seen = kept(torch.arange(6))
        assert seen.law.best.equal(target(tokens).logits.argmax(-1).int())
    assert (len(kept.seen), observer.asked) == (3, 12)
    kept(torch.arange(3))
    assert observer.asked == 12


def test_an_epoch_reads_every_window_once(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten windows in batches of four: the fifth step ends the second epoch."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))  # a second a step
    teacher, head = Teacher(target, LAYERS), Head(Dimensions.of(target.config.to_dict()), len(LAYERS))
    teacher.observe = observer = Counting(target, LAYERS)
    tokens, recipe = torch.randint(VOCABULARY, (80,)), HeadRecipe(5 / 60, 2, 4, 8, bfloat16=False)
    training, read = Training(head, teacher, tokens, tokens[:16], recipe, tmp_path), list[int]()
    own = training._drawn

    def drawn() -> torch.Tensor:
        read.extend((at := own()).tolist())
        return at

    monkeypatch.setattr(training, "_drawn", drawn)
    training.run(watch=lambda _: None)
    assert len(read) == 20
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))
    assert read[:10] != read[10:]
    assert observer.asked <= 10 + 2 + 2, "a batch with a new window is observed whole"
