"""Sessions of streaming input (vllm#44526, #42760): a turn that ends inside an accepted path leaves nothing behind."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import suffix_trees
from tests.engine import heads
from tests.engine.engines import CACHE, DRAFT, ENGINE, PAIR, PROMPTS, TARGET, V2, Engines, tree
from tests.engine.sessions import Answer, Turn, random_sessions, run, stream
from vllm_adaptive_tree.engine.common import stops

TURNS, NODES = 8, 8
COUNT, LEAST = (4, 6) if V2 else (16, 20)  # the interpreter is slow


@pytest.fixture(scope="module")
def sessions() -> list[list[Turn]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS[:COUNT]]
    ends = (
        tokenizer(")\n", add_special_tokens=False).input_ids + tokenizer(" self.", add_special_tokens=False).input_ids
    )
    return random_sessions(prompts, TURNS, ends, seed=1)


@pytest.fixture(scope="module")
def plain(engines: Engines, sessions: list[list[Turn]]) -> list[list[Answer]]:
    answers = run(engines.start(), sessions)
    reasons = Counter(answer.reason for session in answers for answer in session)
    assert min(reasons["stop"], reasons["length"]) > LEAST // 2, reasons
    return answers


DRAFTS: dict[str, dict[str, Any]] = {
    "model-ngram": {"model": DRAFT, "tree": {"lookup": "ngram"}},
    "model-dyspec": {"model": DRAFT, "method": "dyspec"},
    "head": {"model": str(PAIR / "head")},
    "suffix": {"model": "suffix"},
}
MORE: dict[str, dict[str, Any]] = {
    "model": {"model": DRAFT},
    "budget": {"model": DRAFT, "tree": {"budget": "auto"}},
    "model-suffix": {"model": DRAFT, "tree": {"lookup": "suffix"}},
    "head-ngram": {"model": str(PAIR / "head"), "tree": {"lookup": "ngram"}},
    "ngram": {"model": "ngram"},
}
HEADS: dict[str, Callable[[Path], str]] = {
    "eagle": heads.eagle,
    "peagle": heads.peagle,
    "dflash": heads.dflash,
    "dflash2": heads.dflash2,
    "dspark": heads.dspark,
}
TRAINED = {"model", "head"}
"""Drafts whose paths are long enough to go past a stop."""


def started(engines: Engines, name: str, config: dict[str, Any]) -> Any:
    if "suffix" in name:
        suffix_trees.require()
    config = {"method": "opt_tree", "num_speculative_tokens": NODES, **config}
    return engines.start({**config, "tree": {"budget": None, **config.get("tree", {})}})


@pytest.mark.parametrize("name", [*DRAFTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_answers(
    engines: Engines,
    sessions: list[list[Turn]],
    plain: list[list[Answer]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, cut = started(engines, name, (DRAFTS | MORE)[name]), cuts(monkeypatch)
    assert_same(plain, run(llm, sessions))
    if name.split("-")[0] in TRAINED:
        assert sum(cut) > LEAST // 2
    elif not V2:  # of so few sessions look-ups may have no such path there
        assert sum(cut) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[heads.ON_V1] if kind == "peagle" else []) for kind in HEADS]
)
def test_heads(
    engines: Engines, sessions: list[list[Turn]], plain: list[list[Answer]], kind: str, tmp_path: Path
) -> None:
    """With random weights; each keeps something of its own of the tokens that it has read."""
    config = {"model": HEADS[kind](tmp_path / kind), "tree": {"draft": kind, "threshold": 0}}
    assert_same(plain, run(started(engines, kind, config), sessions))


@pytest.mark.slow
def test_a_server_s_engine(engines: Engines, sessions: list[list[Turn]], plain: list[list[Answer]]) -> None:
    """`AsyncLLM`, whose scheduler and worker are in other processes; a turn without a token is refused there."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    engines.shutdown()
    arguments = {**ENGINE, "kv_cache_memory_bytes": CACHE, "speculative_config": tree(NODES, cost_profile=None)}
    empty = [Turn([5, 6], sessions[0][0].params), Turn([], sessions[0][0].params)]

    async def answers() -> tuple[list[list[Answer]], Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=TARGET, **arguments))
        try:
            found = await asyncio.gather(*(stream(engine, f"s-{at}", turns) for at, turns in enumerate(sessions)))
            refused = await asyncio.gather(stream(engine, "empty", empty), return_exceptions=True)
            return found, refused[0]
        finally:
            engine.shutdown()

    ours, refused = asyncio.run(answers())
    assert_same(plain, ours)
    assert isinstance(refused, VLLMValidationError)


def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets how many tokens of each accepted path are behind a stop."""
    found = list[int]()
    delivered = stops.delivered

    def counted(request: Any, tokens: list[int], max_model_len: int) -> int:
        count = delivered(request, tokens, max_model_len)
        found.append(len(tokens) - count)
        return count

    monkeypatch.setattr(stops, "delivered", counted)
    return found


def assert_same(plain: list[list[Answer]], ours: list[list[Answer]]) -> None:
    pairs = [(number, at) for number, session in enumerate(plain) for at in range(len(session))]
    different = [(number, at) for number, at in pairs if ours[number][at] != plain[number][at]]
    assert not different, [(ours[number][at], plain[number][at]) for number, at in different[:3]]
