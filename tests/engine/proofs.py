"""Conditions on a row beside identity: it reproduces the report, and nothing else suffers."""

from collections.abc import Iterator
from typing import Any

from tests.engine.conversations import Answer
from tests.engine.engines import assert_identical
from tests.engine.reports import Proof, Run
from tests.engine.test_sampling import assert_close

BLOCK = 32


def identical(run: Run) -> None:
    """Check tokens, the reason of the end, the text, and the requested logprobs."""
    pairs = [(here, there) for ours, theirs in run.both() for here, there in _completions(ours, theirs)]
    assert pairs
    assert_identical([there for _, there in pairs], [here for here, _ in pairs])
    for here, there in pairs:
        if list(here.token_ids) == list(there.token_ids):
            assert here.stop_reason == there.stop_reason
            if here.logprobs is not None:
                assert len(here.logprobs) == len(here.token_ids)
                assert_close(here.logprobs, there.logprobs)
    for ours, theirs in run.both():
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
        if ours.prompt_logprobs is not None:
            assert_close(ours.prompt_logprobs, theirs.prompt_logprobs)


def _completions(ours: Answer, theirs: Answer) -> Iterator[tuple[Any, Any]]:
    return zip(ours.completions, theirs.completions, strict=True)


def distinct(run: Run) -> None:
    found = [tuple(one.token_ids) for answer in run.ours for one in answer.completions]
    assert len({*found}) == len(found)


def accepted(tokens: int) -> Proof:
    """Check that at least so many drafted tokens were accepted."""

    def proof(run: Run) -> None:
        found = run.figures["spec_decode_num_accepted_tokens"]
        assert found >= tokens, f"{found} of {run.tokens}"

    return proof


def cut(requests: int) -> Proof:
    """Check that at least so many answers end inside an accepted path: fewer tokens are kept than were sampled."""

    def proof(run: Run) -> None:
        kept = sorted(len(one.token_ids) for answer in run.ours for one in answer.completions)
        sampled = sorted(map(sum, run.steps.values()))
        assert len(kept) == len(sampled)
        assert sum(sampled) - sum(kept) >= requests, sum(sampled) - sum(kept)

    return proof


def stopped(requests: int) -> Proof:
    """Check that at least so many answers end by a stop."""

    def proof(run: Run) -> None:
        reasons = [one.finish_reason for answer in run.plain for one in answer.completions]
        assert reasons.count("stop") >= requests, reasons.count("stop")

    return proof


def full(length: int) -> Proof:
    """Check that every text ends at this length, the longest that the engine takes."""

    def proof(run: Run) -> None:
        assert {len(one.prompt) + len(one.completions[0].token_ids) for one in run.ours} == {length}

    return proof


def preempted(run: Run) -> None:
    assert run.figures["num_preemptions"] > 0


def hit(run: Run) -> None:
    assert run.figures["prefix_cache_hits"] > 0


def cached(blocks: int = 0) -> Proof:
    """Check for as many cached tokens of each prompt as without speculation, but for so many blocks."""

    def proof(run: Run) -> None:
        assert any(theirs.cached for _, theirs in run.both())
        for ours, theirs in run.both():
            assert ours.cached == max(0, theirs.cached - blocks * BLOCK), (ours.cached, theirs.cached)

    return proof


def accepted_alike(run: Run) -> None:
    """Check that requests of one prompt, one after the other, need equally many steps, whatever was in the cache."""
    first, *others = (len(steps) for steps in run.steps.values())
    assert all(abs(one - first) <= 1 for one in others), (first, *others)
    assert first < len(run.ours[0].completions[0].token_ids)


def drafted_alike(*alike: int) -> Proof:
    """Check that these requests of a batch have the same trees, and some other request has another."""

    def proof(run: Run) -> None:
        whole = [[one.tokens for one in batch] for batch in run.batches if len(batch) == len(run.ours)]
        assert whole
        for batch in whole:
            own = [batch[i] for i in alike]
            assert own.count(own[0]) == len(own)
            assert len({*batch}) > 1

    return proof


def together(run: Run) -> None:
    """Check that some step verifies a tree of every request."""
    assert any(len(batch) == len(run.ours) and all(map(len, batch)) for batch in run.batches)


def shaped(*parents: int) -> Proof:
    """Check the parents of every tree."""

    def proof(run: Run) -> None:
        assert {one.parents for batch in run.batches for one in batch} == {parents}

    return proof


def rested(run: Run) -> None:
    """Check that one request has steps with trees and without."""
    assert any(1 in steps[1:-1] and max(steps) > 1 for steps in run.steps.values())
