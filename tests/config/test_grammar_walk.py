"""Walks of grammars on random trees, without an engine: right masks, and a grammar that answers as if it had not
walked. A fault of a backend costs nodes, not the request."""

import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output import ConstraintBounds
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind

from tests.config.test_grammar import (
    ANY,
    BACKENDS,
    CONFIG,
    END,
    NODES,
    REGEX,
    TOKENIZER,
    VOCABULARY,
    A,
    B,
    D,
    E,
    X,
    alone,
    blank,
)
from tests.engine.test_structured import LARK, NUMBERS, SCHEMA, TAGS
from vllm_adaptive_tree.engine.grammar import walk as walks
from vllm_adaptive_tree.engine.grammar.copies import GrammarCopy
from vllm_adaptive_tree.engine.grammar.masked_drafter import unpacked
from vllm_adaptive_tree.engine.grammar.structured_outputs import (
    TreeGrammarOutput,
    acceptable_of,
    is_lost,
    tree_masks,
    walk_of,
)
from vllm_adaptive_tree.engine.grammar.walk import TreeTokens

NUMBERED = [276, 16, 201, 1918]
"""Tokens that `NUMBERS` names by number, after a word."""
ALL = [(Kind.REGEX, REGEX), (Kind.JSON, json.dumps(SCHEMA))]
GRAMMARS = {
    "xgrammar": [*ALL, (Kind.STRUCTURAL_TAG, json.dumps(TAGS))],
    "guidance": [
        *ALL,
        (Kind.STRUCTURAL_TAG, json.dumps(TAGS)),
        (Kind.GRAMMAR, LARK["grammar"]),
        (Kind.GRAMMAR, NUMBERS["grammar"]),
    ],
    "outlines": ALL,
}
CASES = [(name, *one) for name, kinds in GRAMMARS.items() for one in kinds]
IDS = [f"{name}-{kind.name}-{text[:7]}" for name, kind, text in CASES]
TREES = 12
Path = Sequence[int]


@pytest.fixture(scope="module")
def backends() -> dict[str, Any]:
    return {name: one(CONFIG, tokenizer=TOKENIZER, vocab_size=VOCABULARY) for name, one in BACKENDS.items()}


def manager_of(backend: Any) -> Any:
    return SimpleNamespace(
        backend=backend,
        vllm_config=SimpleNamespace(
            num_speculative_tokens=NODES, scheduler_config=SimpleNamespace(max_num_seqs=4), model_config=None
        ),
        _grammar_bitmask=None,
        _get_constraint_bounds=lambda *_, **__: ConstraintBounds(0, 0),
        _masked_reasoning_ends=lambda _: (),
    )


@pytest.fixture
def manager(backends: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return manager_of(backends[request.param])


def request_of(grammar: Any, kind: Kind, said: Path) -> Any:
    """Request whose grammar has read `said`."""
    for token in said:
        assert grammar.accept_tokens("", [token])
    own = SimpleNamespace(grammar=grammar, structured_output_key=(kind, ""), reasoning_ended=len(said) > 0)
    return SimpleNamespace(request_id="one", structured_output_request=own, output_token_ids=[*said])


def mask_of(grammar: Any, words: int) -> Tensor:
    """[V] bool; all after its end."""
    mask = torch.full((1, words), ANY, dtype=torch.int32)
    if not grammar.is_terminated():
        grammar.fill_bitmask(mask, 0)
    return unpacked(mask, VOCABULARY)[0]


class Texts:
    """Random tokens that a fresh grammar allows, or not."""

    def __init__(self, new: Callable[[], Any], words: int, seed: int):
        self.new, self.words, self.choose = new, words, random.Random(seed)

    def at(self, path: Path) -> Any:
        """A fresh grammar that has read `path`; None if it rejects it."""
        grammar = self.new()
        for token in path:
            if not (grammar.validate_tokens([token]) and grammar.accept_tokens("", [token])):
                return None
        return grammar

    def allowed(self, grammar: Any) -> int:
        tokens = mask_of(grammar, self.words).nonzero().flatten().tolist()
        named = [token for token in tokens if token in NUMBERED]
        return self.choose.choice(named if named and self.choose.random() < 0.7 else tokens)

    def token(self, path: Path) -> int:
        if (sort := self.choose.random()) < 0.1 or (grammar := self.at(path)) is None:
            return self.choose.randrange(VOCABULARY)
        return END if sort < 0.2 else self.allowed(grammar)

    def said(self) -> list[int]:
        """Up to five tokens, before the end of the grammar."""
        path: list[int] = []
        for _ in range(self.choose.randrange(6)):
            grammar = self.at(longer := [*path, self.allowed(self.at(path))])
            if grammar is None or grammar.is_terminated():
                break
            path = longer
        return path

    def tree(self, said: Path) -> tuple[TreeTokens, list[list[int]]]:
        """And the path of its root and of each node."""
        tokens, parents, paths = list[int](), list[int](), [list[int]()]
        for _ in range(self.choose.randrange(1, NODES)):
            above = self.choose.choice([0, *range(max(0, len(paths) - 5), len(paths))])
            tokens.append(self.token([*said, *paths[above]]))
            parents.append(above - 1)
            paths.append([*paths[above], tokens[-1]])
        return TreeTokens(tokens, parents), paths


def assert_answers_alike(grammar: Any, other: Any, texts: Texts) -> None:
    """Masks of the next three tokens, and the same tokens accepted."""
    for _ in range(3):
        assert grammar.is_terminated() == other.is_terminated()
        assert mask_of(grammar, texts.words).equal(mask_of(other, texts.words))
        if other.is_terminated():
            return
        token = texts.allowed(other)
        for rejected in (texts.choose.randrange(VOCABULARY), token):
            assert grammar.validate_tokens([rejected]) == other.validate_tokens([rejected])
        assert grammar.accept_tokens("", [token]) == other.accept_tokens("", [token])


@pytest.mark.parametrize(("manager", "kind", "text"), CASES, indirect=["manager"], ids=IDS)
def test_a_walk_leaves_no_trace(manager: Any, kind: Kind, text: str) -> None:
    ends = numbers = rejected = 0
    words = manager.backend.allocate_token_bitmask(1).shape[1]
    for seed in range(TREES):
        texts = Texts(lambda: manager.backend.compile_grammar(kind, text), words, seed)
        said = texts.said()
        tree, paths = texts.tree(said)
        request = request_of(texts.new(), kind, said)
        masks = tree_masks(manager, {"one": request}, ["one"], {"one": tree})
        assert masks is not None
        draft, walk = torch.zeros(len(paths), words, dtype=torch.int32), walk_of(manager, request, words)
        for row in sorted(range(len(paths)), key=lambda row: (len(paths[row]), paths[row])):  # level by level
            walk.fill(paths[row], draft, row)
        walk.close()
        for path, *found in zip(paths, torch.tensor(masks), draft, strict=False):
            state = texts.at([*said, *path])
            wanted = torch.ones(VOCABULARY, dtype=torch.bool) if state is None else mask_of(state, words)
            assert all(unpacked(one[None], VOCABULARY)[0].equal(wanted) for one in found), (said, path)
            ends += state is not None and state.is_terminated()
            rejected += state is None
            numbers += state is not None and path[-1:] == [NUMBERED[0]]
        assert not is_lost(request)
        assert_answers_alike(request.structured_output_request.grammar, texts.at(said), texts)
    assert rejected > TREES / 2
    assert numbers > TREES / 2 or text != NUMBERS["grammar"]
    assert ends > 3 or kind is not Kind.REGEX


# -- faults


class Part:
    """State that a copy of a `Faulty` grammar copies."""

    def __init__(self, grammar: Any, fault: str):
        self.grammar, self.fault = grammar, fault

    def fork(self) -> "Part":
        if self.fault == "copy":
            raise RuntimeError("no memory")
        copied = walks.copying(self.grammar)
        assert copied is not None
        return Part(copied(self.grammar), self.fault)


class Faulty:
    """A third party's grammar: xgrammar's with a fault, with copies or without."""

    def __init__(self, grammar: Any, fault: str, *, copies: bool):
        self.fault, self.place, self.last = fault, "matcher" if copies else "kept", -1
        setattr(self, self.place, Part(grammar, fault))

    @property
    def own(self) -> Any:
        return getattr(self, self.place).grammar

    def accept_tokens(self, request: str, tokens: list[int]) -> bool:
        if self.fault == "accept" and E in tokens:
            raise RuntimeError("no such state")
        self.last = tokens[-1]
        return bool(self.own.accept_tokens(request, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [*self.own.validate_tokens(tokens)]

    def rollback(self, count: int) -> None:
        if self.fault == "rollback":
            raise RuntimeError("too far")
        self.own.rollback(count - 1 if self.fault == "too short" else count)

    def fill_bitmask(self, mask: Tensor, row: int) -> None:
        if self.fault == "mask" and self.last == E:
            raise RuntimeError("no mask")
        self.own.fill_bitmask(mask, row)

    def is_terminated(self) -> bool:
        return bool(self.own.is_terminated())


FAULTS = [
    *((fault, copies) for fault in ("too short", "rollback", "accept", "mask") for copies in (False, True)),
    ("copy", True),
]
SAID = TreeTokens([B, E, END, D, E], [-1, 0, 1, -1, 3])
"""Behind an a, which has been put out: a branch to the end, and one that is rejected."""


@pytest.mark.parametrize("manager", ["xgrammar"], indirect=True)
@pytest.mark.parametrize(("fault", "copies"), FAULTS)
def test_a_fault_costs_the_trees_of_its_request(
    manager: Any, fault: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without copies another grammar takes the place of the one that has walked."""
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_adaptive_tree.engine import patches
    from vllm_adaptive_tree.engine.names import MARK

    backend = manager.backend
    texts = Texts(lambda: backend.compile_grammar(Kind.REGEX, REGEX), blank(backend, 1).shape[1], 0)
    faulty, sound = (
        request_of(grammar, Kind.REGEX, [A]) for grammar in (Faulty(texts.new(), fault, copies=copies), texts.new())
    )
    requests, given = {"faulty": faulty, "sound": sound}, faulty.structured_output_request.grammar
    for request in requests.values():
        request.use_structured_output = True

    def step(drafts: dict[str, TreeTokens]) -> tuple[Tensor, TreeGrammarOutput]:
        masks = tree_masks(manager, requests, [*requests], drafts)
        output = GrammarOutput([*requests], masks, [len(drafts.get(name, ())) for name in requests])
        return torch.tensor(masks), TreeGrammarOutput.of(output, manager, requests)

    manager._create_grammar = lambda request: Faulty(texts.new(), fault, copies=copies)
    masks, output = step({"faulty": SAID, "sound": SAID})
    root = alone(backend, [A])
    second = len(masks) // 2
    assert root is not None
    assert unpacked(masks[:1], VOCABULARY)[0].equal(root)
    assert unpacked(masks[second : second + 2], VOCABULARY).equal(torch.stack([root, alone(backend, [A, B])]))
    assert acceptable_of(output) == {"faulty": 0, "sound": len(SAID)}
    assert output.walks is not None
    assert [*output.walks] == ["sound"]
    assert (is_lost(faulty), is_lost(sound)) == (True, False)
    assert (faulty.structured_output_request.grammar is given) == copies
    patches.install()
    monkeypatch.setattr(manager.vllm_config, "speculative_config", SimpleNamespace(**{MARK: True}), raising=False)
    drafts = {name: StructuredOutputManager.validate_tokens(manager, one, SAID) for name, one in requests.items()}
    assert drafts == {"faulty": [], "sound": SAID}
    masks, output = step({"faulty": SAID})  # as vLLM may keep it beyond a preemption
    assert unpacked(masks[:1], VOCABULARY)[0].equal(root)
    assert acceptable_of(output) == {"faulty": 0, "sound": 0}
    faulty.structured_output_request.grammar.fault = ""
    for request in requests.values():
        assert_answers_alike(request.structured_output_request.grammar, texts.at([A]), texts)


@pytest.mark.parametrize("manager", ["xgrammar"], indirect=True)
@pytest.mark.parametrize(("fault", "copies"), FAULTS)
def test_a_fault_of_a_copy_ends_what_the_draft_follows(manager: Any, fault: str, copies: bool) -> None:
    """In a worker elsewhere; a wrong rollback of a copy that is dropped does no harm."""
    backend = manager.backend
    texts = Texts(lambda: backend.compile_grammar(Kind.REGEX, REGEX), blank(backend, 1).shape[1], 0)
    own = SimpleNamespace(
        grammar=Faulty(texts.new(), fault, copies=copies),
        structured_output_key=(Kind.REGEX, REGEX),
        reasoning_ended=True,
        is_grammar_ready=True,
    )
    copy: Any = object.__new__(GrammarCopy)
    copy.manager, copy.structured, copy.read, copy.follows = manager, own, 0, True
    copy.request = SimpleNamespace(request_id="one", use_structured_output=True, structured_output_request=own)
    walk, mask = copy.walk([A], texts.words), blank(backend, 1)
    for path in ([B], [B, E], [D], [B, E, END], [X]):
        walk.fill(path, mask)
    walk.allowed([B], [E, E, D])
    walk.close()
    assert copy.follows == (fault == "too short" and copies)
    assert (copy.walk([A, B], texts.words) is None) != copy.follows
    copy.structured.grammar.fault = "accept"
    assert copy.walk([A, B, E], texts.words) is None, "no step fails for it"
    assert not copy.follows
