"""One pass over the draft's logits against softmax."""

import math

import numpy as np
import pytest
import torch

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.proposers.row_scan import CHUNK, LN2, best_entries, next_best, probability, scan


def assert_right(logits: torch.Tensor, temperature: torch.Tensor) -> None:
    rows, broken = scan(Rows(logits), temperature, None)
    assert not broken.any()
    assert not rows.dead.any()
    found, probs = rows.scan, (logits.double() / temperature[:, None, None]).softmax(-1).flatten(0, 1)
    chunks = [part.flatten(0, 1) for part in logits.float().split(CHUNK, 2)]
    assert np.array_equal(found.maxima, torch.stack([chunk.amax(1) for chunk in chunks], 1).numpy())
    sums = torch.stack([part.sum(1) for part in probs.split(CHUNK, 1)], 1).numpy()
    assert np.abs(found.sums / found.total[:, None] - sums).max() < 2e-6
    power = logits.flatten(0, 1).double().numpy() * found.scale[:, None] - found.shift[:, None]
    ours = power * LN2 - np.log(found.total)[:, None]
    expected = (logits.double() / temperature[:, None, None]).log_softmax(-1).flatten(0, 1).numpy()
    near = expected > -30
    assert np.abs(ours[near] - expected[near]).max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 7, CHUNK, CHUNK + 1, 3000])
def test_normaliser_maxima_and_sums(vocabulary, dtype):
    generator = torch.Generator().manual_seed(vocabulary)
    for scale in (0.1, 3.0, 12.0):
        logits = (scale * torch.randn(2, 3, vocabulary, generator=generator)).to(dtype)
        assert_right(logits, torch.tensor([0.6, 1.0]))


def test_references_that_rise():
    """By little and by much, from a first entry that is banned."""
    logits = torch.arange(0, 3000, 0.3)[None, None, :6000].clone() / 20
    logits[..., CHUNK * 4 :] += 500
    logits[..., 0] = -torch.inf
    assert_right(logits, torch.tensor([0.7]))
    assert_right(logits.flip(-1), torch.tensor([0.7]))


def test_rows_in_strides():
    whole = torch.randn(3, 5, 400, generator=torch.Generator().manual_seed(0))
    assert_right(whole[:, :1], torch.tensor([0.6, 1.0, 2.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dead_rows(value, dtype):
    """NaN of either sign anywhere, +Inf anywhere, -Inf throughout; marked and unused ones are not broken."""
    for place in (0, 5, 299, 999):
        logits = torch.randn(1, 4, 1000).to(dtype)
        logits[:, :, slice(None) if value == -math.inf else place] = value
        logits[0, 1] = torch.randn(1000).to(dtype)
        if place == 5:
            logits = -logits if math.isnan(value) else logits
        marked, used = torch.tensor([[False, False, True, False]]), torch.tensor([[True, True, True, False]])
        rows, broken = scan(Rows(logits, dead=marked), torch.ones(1), used)
        assert broken.tolist() == [[True, False, False, False]]
        assert rows.dead.tolist() == [[True, False, True, True]]
        assert (rows.logits[0, 0] == 0).all()


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 100.0])
def test_extreme_temperatures(temperature):
    logits = 10 * torch.randn(1, 1, 700, generator=torch.Generator().manual_seed(1))
    rows, broken = scan(Rows(logits), torch.tensor([temperature]), None)
    assert not broken.any()
    best = probability(tuple(rows.scan), 0, np.float32(logits.max()))
    assert best == pytest.approx((logits / temperature).softmax(-1).max().item(), rel=1e-4)


@pytest.mark.parametrize("kinds", [3, 100_000])
def test_the_best_tokens_in_order(kinds):
    """Of many equals and of few, the smaller token first."""
    logits = torch.randint(0, kinds, (1, 2, 1500), generator=torch.Generator().manual_seed(2)).float() / kinds
    found = tuple(scan(Rows(logits), torch.ones(1), None)[0].scan)
    for row in range(2):
        order = logits[0, row].sort(descending=True, stable=True).indices[:40].tolist()
        tokens, values = np.empty(40, np.int64), np.empty(40, np.float32)
        assert best_entries(found, row, -np.inf, tokens, values) == 40
        assert tokens.tolist() == order
        maxima, wide = found[4][row].copy(), np.empty(CHUNK, np.float32)
        token, logit, one_by_one = -1, np.float32(np.inf), []
        for _ in range(40):
            token, logit = next_best(found, row, maxima, token, np.float32(logit), wide)
            one_by_one.append(token)
        assert one_by_one == order
