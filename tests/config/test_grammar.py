"""Grammars along the branches of trees, without an engine: the mask of a node is that of its path, read alone."""

import pickle
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import StructuredOutputRequest

from tests.engine.engines import TARGET, tree
from vllm_adaptive_tree.drafters import Continuations, Rows
from vllm_adaptive_tree.engine.grammar import copies as grammars
from vllm_adaptive_tree.engine.grammar.masked_drafter import MaskedDrafter, masked_continuations, unpacked
from vllm_adaptive_tree.engine.grammar.structured_outputs import FIRST, TreeGrammarOutput, advance, masks_of, tree_masks
from vllm_adaptive_tree.engine.grammar.walk import ANY, Bounds, GrammarWalk, TreeTokens
from vllm_adaptive_tree.engine.vllm_api import MASKED_ENDS

TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
VOCABULARY = len(TOKENIZER)
A, B, C, D, E, X = (TOKENIZER(letter, add_special_tokens=False).input_ids[0] for letter in "abcdex")
END = TOKENIZER.eos_token_id
REGEX = "(ab|cd)e{1,2}"
BACKENDS = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
NODES = 16
TREE = TreeTokens(
    [A, C, B, D, E, END, X, E, E, END, D, X, E, A],
    [-1, -1, 0, 1, 2, 4, 2, 4, 3, 7, -1, 10, 8, 9],
)
"""Both words, a sibling and a first node that the regex rejects, ends with nodes below them."""
Said = Sequence[int]


def at_once(path: Said) -> Bounds:
    return Bounds(0, 0)


def after_x(path: Said) -> Bounds:
    """A request that reasons up to its first x."""
    start = path.index(X) + 1 if X in path else max(1, len(path) + 1)
    return Bounds(start, start)


CONFIG: Any = SimpleNamespace(
    structured_outputs_config=StructuredOutputsConfig(),
    model_config=None,
    speculative_config=SimpleNamespace(num_speculative_tokens=NODES),
)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param](CONFIG, tokenizer=TOKENIZER, vocab_size=VOCABULARY)


def walk_of(backend: Any, bounds: Any = at_once, **how: Any) -> GrammarWalk:
    grammar = backend.compile_grammar(StructuredOutputOptions.REGEX, REGEX)
    return GrammarWalk(grammar, bounds, backend.allocate_token_bitmask(1).shape[1], **how)


def blank(backend: Any, rows: int) -> Tensor:
    """As the last step may have left it."""
    return backend.allocate_token_bitmask(rows).fill_(0x55555555)


def paths(tree: TreeTokens) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token, parent in zip(tree, tree.parents, strict=True):
        found.append([*found[1 + parent], token])
    return found


def alone(backend: Any, path: Said) -> Tensor | None:
    """Tokens [V] bool that a fresh grammar allows after `path`; None if it rejects the path."""
    grammar, mask = backend.compile_grammar(StructuredOutputOptions.REGEX, REGEX), blank(backend, 1)
    for token in path:
        if grammar.is_terminated():
            return torch.ones(VOCABULARY, dtype=torch.bool)
        grammar.fill_bitmask(mask, 0)
        if not unpacked(mask, VOCABULARY)[0, token]:
            return None
        assert grammar.accept_tokens("", [token])
    if grammar.is_terminated():
        return torch.ones(VOCABULARY, dtype=torch.bool)
    grammar.fill_bitmask(mask, 0)
    return unpacked(mask, VOCABULARY)[0]


def test_the_mask_of_a_node_is_that_of_its_path(backend: Any) -> None:
    walk, mask = walk_of(backend), blank(backend, 1 + len(TREE))
    for _ in range(2):  # the grammar is left where it stood
        walk.fill_tree(TREE, mask)
        for row, path in enumerate(paths(TREE)):
            wanted = alone(backend, path)
            found = unpacked(mask[row : row + 1], VOCABULARY)[0]
            assert found.equal(torch.ones_like(found) if wanted is None else wanted), path
    known = unpacked(mask, VOCABULARY).sum(1)
    assert known.min() >= 1, "no row is empty, whatever a rule reads of it"
    assert sum(known < VOCABULARY) >= 9


def test_in_the_middle_of_a_request(backend: Any) -> None:
    walk, mask = walk_of(backend), blank(backend, 3)
    assert walk.grammar.accept_tokens("", [C])
    walk.fill_tree(TreeTokens([D, E], [-1, 0]), mask)
    for row, path in enumerate(([C], [C, D], [C, D, E])):
        assert unpacked(mask[row : row + 1], VOCABULARY)[0].equal(alone(backend, path))


def test_after_its_end(backend: Any) -> None:
    walk, mask = walk_of(backend), blank(backend, 3)
    for token in (A, B, E, END):
        assert walk.grammar.accept_tokens("", [token])
    walk.fill_tree(TreeTokens([A, B], [-1, 0]), mask)
    assert (mask == ANY).all()


def test_placeholders_are_no_nodes(backend: Any) -> None:
    walk, mask = walk_of(backend), blank(backend, 4)
    walk.fill_tree([-1, -1, -1], mask)
    assert unpacked(mask[:1], VOCABULARY)[0].equal(alone(backend, []))
    assert (mask[1:] == ANY).all()


def test_reasoning_that_ends_on_a_branch(backend: Any) -> None:
    tree = TreeTokens([A, X, A, B, X, C, E], [-1, -1, 1, 2, 0, 4, 3])
    walk, mask = walk_of(backend, after_x), blank(backend, 1 + len(tree))
    walk.fill_tree(tree, mask)
    for row, path in enumerate(paths(tree)):
        found = unpacked(mask[row : row + 1], VOCABULARY)[0]
        wanted = alone(backend, path[path.index(X) + 1 :]) if X in path else torch.ones_like(found)
        assert found.equal(wanted), path
    assert walk.walker.read == []


def test_a_grammar_may_end_inside_what_is_emitted(backend: Any) -> None:
    def bounds(request: Any, tokens: Said, *, spec_tokens_committed: bool) -> Bounds:
        assert spec_tokens_committed
        return after_x(tokens)

    manager, own = SimpleNamespace(_get_constraint_bounds=bounds), SimpleNamespace(reasoning_ended=False)
    request = SimpleNamespace(use_structured_output=True, request_id="", structured_output_request=own)
    request.output_token_ids = [D] * 5 + [B, X, A, B, E, E, END, D, D]
    own.grammar = backend.compile_grammar(StructuredOutputOptions.REGEX, REGEX)
    assert advance(manager, request, [A, B, C])
    assert not own.reasoning_ended
    assert advance(manager, request, [B, X, A, B, E, E, END, D, D])
    assert own.reasoning_ended
    assert getattr(own, FIRST) == 5 + 2
    assert own.grammar.is_terminated()
    own.grammar = backend.compile_grammar(StructuredOutputOptions.REGEX, REGEX)
    assert not advance(manager, request, [X, A, D])


def test_tokens_that_may_not_end_the_reasoning(backend: Any) -> None:
    walk, mask = walk_of(backend, after_x, no_ends=[X, D]), blank(backend, 3)
    walk.fill_tree(TreeTokens([A, X], [-1, -1]), mask)
    found = unpacked(mask, VOCABULARY)
    for row in (0, 1):
        assert (~found[row]).nonzero().flatten().tolist() == sorted([X, D])
    assert found[2].equal(alone(backend, []))


def test_a_prefix_is_what_a_scheduler_leaves() -> None:
    cut = TREE[:5]
    assert (list(cut), cut.parents) == (list(TREE)[:5], TREE.parents[:5])
    sent = pickle.loads(pickle.dumps(TREE))
    del sent[4:]
    assert (type(sent), list(sent), sent.parents) == (TreeTokens, list(TREE)[:4], TREE.parents[:4])
    assert TreeTokens.of([5, 6, 7]).parents == (-1, 0, 1)
    assert TreeTokens.of(TREE) is TREE


def test_masks_of_what_is_verified() -> None:
    masks = np.arange(12, dtype=np.int32)[:, None]
    output = GrammarOutput(["a", "b", "c"], masks)
    scheduled, verified = {"a": [1] * 4, "b": [1] * 3, "x": [1]}, {"a": [1] * 2, "x": [1]}
    kept = masks_of(output, scheduled, verified)
    assert kept is not None
    assert kept.grammar_bitmask[:, 0].tolist() == ([*range(12)] if MASKED_ENDS else [0, 1, 2, 5, 9])
    assert masks_of(output, scheduled, scheduled) is output
    assert masks_of(None, scheduled, verified) is None


class ToX:
    """A request reasons up to its first x."""

    def __init__(self, tokenizer: Any): ...

    def is_reasoning_end(self, tokens: Said) -> bool:
        return False

    def is_reasoning_end_streaming(self, tokens: Said, delta: Said) -> bool:
        return X in delta


def compiled(own: StructuredOutputRequest) -> None:
    while not own.is_grammar_ready:
        time.sleep(0.01)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_worker_in_another_process_follows_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand where the scheduler's grammars stand; the grammars themselves do not travel."""
    arguments = EngineArgs(model=TARGET, dtype="float32", max_model_len=512, speculative_config=tree(NODES))
    config = arguments.create_engine_config()
    manager, worker = StructuredOutputManager(config), grammars.Grammars(config)
    monkeypatch.setattr(manager, "reasoner_cls", ToX)
    monkeypatch.setattr(grammars, "is_rank_0", lambda: True)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=REGEX))
    params.structured_outputs._backend = name
    requests, states = dict[str, Request](), dict[str, Any]()
    for request, reasons in (("plain", False), ("reasons", True)):
        requests[request] = Request(request, [D], params, None, reasoning_ended=not reasons)
        states[request] = SimpleNamespace(sampling_params=params, output_token_ids=[])
        manager.grammar_init(requests[request])
        compiled(requests[request].structured_output_request)

    def output() -> TreeGrammarOutput:
        masks = tree_masks(manager, requests, [*requests], {})
        return TreeGrammarOutput.of(GrammarOutput([*requests], masks, [0] * len(requests)), manager, requests)

    def step() -> Any:
        return worker.of(pickle.loads(pickle.dumps(output())), states)

    def emit(request: str, tokens: Said) -> None:
        requests[request].append_output_token_ids([*tokens])
        states[request].output_token_ids += tokens
        assert advance(manager, requests[request], tokens)

    def allows(walk: GrammarWalk, path: Said) -> Tensor:
        mask = torch.zeros(1, walk.words, dtype=torch.int32)
        walk.fill(path, mask)
        walk.close()
        return unpacked(mask, VOCABULARY)[0]

    def after(path: Said) -> Tensor:
        found = alone(BACKENDS[name](CONFIG, tokenizer=TOKENIZER, vocab_size=VOCABULARY), path)
        assert found is not None
        return found

    step()  # nothing, unless it has been compiled by then
    assert [*worker.copies] == ["plain"]
    compiled(worker.copies["plain"].result().structured)
    found = step()
    assert [*found] == ["plain"]
    assert allows(found["plain"], []).equal(after([]))
    emit("plain", [A])
    emit("reasons", [D, E, X, C])
    step()
    compiled(worker.copies["reasons"].result().structured)
    for _ in range(2):  # a step may emit nothing
        found = step()
        assert [*found] == ["plain", "reasons"]
        assert allows(found["plain"], []).equal(after([A]))
        assert allows(found["plain"], [B]).equal(after([A, B]))
        assert allows(found["reasons"], []).equal(after([C]))
    emit("plain", [B, E, END])
    emit("reasons", [D])
    states["reasons"].output_token_ids.append(X)  # which its grammar rejects
    found = step()
    assert [*found] == ["plain"]
    assert allows(found["plain"], []).all(), "it has ended"
    states["reasons"].output_token_ids.pop()
    assert [*step()] == ["plain"], "it does not come back"
    worker.forget(["reasons", "unknown"])
    assert [*worker.copies] == ["plain"]
    own = output()
    assert own.walks is not None
    assert worker.of(own, states) is own.walks, "in the scheduler's process"
    assert worker.of(None, states) == {}
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "StructuredOutputManager", lambda _: 1 / 0)
        worker = grammars.Grammars(config)
        assert step() == {}
        assert isinstance(worker.copies["plain"].exception(), ZeroDivisionError)
        assert step() == {}, "no step fails for it"
    monkeypatch.setattr(grammars, "is_rank_0", lambda: False)
    worker = grammars.Grammars(config)
    assert step() == {}
    assert worker.copies == {}


# -- the draft


class Flat:
    """A drafter that finds all tokens alike, and whose second request knows nothing."""

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        logits[1] = -torch.inf
        return Rows(logits), state


def test_rows_of_the_draft_are_masked_along_branches(backend: Any) -> None:
    """Of two requests the first has a grammar, and has emitted an a since the grammar has read."""
    walk = walk_of(backend)
    drafter = MaskedDrafter(Flat(), {0: (walk, [A])})
    rows = drafter.roots(Flat().grow(torch.zeros(2, 1), torch.zeros(2, 1), None)[0])
    assert (rows.logits[0, 0] == 0).equal(alone(backend, [A]))
    assert rows.logits[1].isinf().all()
    assert rows.dead is None
    levels = [([B, X, -1], [0, 0, 0], [[A, B], None, None]), ([E, E], [1, 1], [[A, B, E]] * 2)]
    for tokens, parent, wanted in levels:
        rows, _ = drafter.grow(torch.tensor([tokens] * 2), torch.tensor([parent] * 2), None)
        for column, path in enumerate(wanted):
            allowed = rows.logits[0, column] == 0
            assert allowed.equal(torch.ones_like(allowed) if path is None else alone(backend, path)), (tokens, path)
    walk.close()
    mask = blank(backend, 1)
    assert walk.fill([], mask)
    assert unpacked(mask, VOCABULARY)[0].equal(alone(backend, []))


def test_a_row_without_an_allowed_token_is_dead_and_no_fault(backend: Any) -> None:
    logits = torch.full((1, 1, VOCABULARY), -torch.inf)
    logits[0, 0, X] = 0.0
    rows = MaskedDrafter(Flat(), {0: (walk_of(backend), [])}).roots(Rows(logits))
    assert rows.dead is not None
    assert rows.dead.tolist() == [[True]]


def test_continuations_end_where_a_grammar_rejects_them(backend: Any) -> None:
    found = Continuations(
        torch.tensor([[[B, E, E, X], [X, B, E, -1]], [[X, X, X, X], [A, -1, -1, -1]]]), torch.ones(2, 2)
    )
    cut = masked_continuations(found, {0: (walk_of(backend), [A])})
    assert cut.tokens.tolist() == [
        [[B, E, E, -1], [-1] * 4],
        [[X, X, X, X], [A, -1, -1, -1]],
    ]
    assert masked_continuations(found, {}) is found


def test_no_further_than_a_grammar_can_come_back(backend: Any) -> None:
    walk, mask = walk_of(backend, furthest=2), blank(backend, 1)
    assert walk.fill([A, B], mask)
    assert not walk.fill([A, B, E], mask)
    assert (mask == ANY).all()
    walk.close()
    assert walk.fill([], mask)


def test_trees_without_nodes_reach_the_scheduler() -> None:
    """Beside so many requests that none is left a node."""
    from vllm_adaptive_tree.engine.v2.draft_tokens import DraftTreesHandler

    handler: Any = object.__new__(DraftTreesHandler)
    handler.copy_event = SimpleNamespace(synchronize=lambda: None)
    handler.req_ids, handler.draft_tokens_np = ["a", "b"], np.zeros((2, 0, 2), dtype=np.int64)
    assert handler.get_draft_tokens().draft_token_ids == [[], []]


def test_requests_without_a_grammar_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model Runner V2 gives the scheduler placeholders for them."""
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_adaptive_tree.engine import patches
    from vllm_adaptive_tree.engine.names import MARK

    patches.install()
    manager = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(**{MARK: True})))
    for structured, kept in ((False, [5, -1, -1]), (True, [5])):
        request = SimpleNamespace(use_structured_output=structured, structured_output_request=None)
        assert StructuredOutputManager.validate_tokens(manager, request, [5, -1, -1]) == kept
