"""Grammars of vLLM's scheduler applied to trees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_outlines import OutlinesGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind

from vllm_adaptive_tree.engine.grammar.walk import Bounds, GrammarWalk, copying
from vllm_adaptive_tree.engine.vllm_api import MASKED_ENDS, mask_rows, masked_ends

logger = init_logger(f"vllm.{__name__}")

FIRST = "adaptive_tree_first"
"""Attribute of a StructuredOutputRequest: index of the first output token that its grammar reads, unless 0."""
LOST = "adaptive_tree_lost"
"""Attribute of it, too: set after a fault of its grammar, after which it has no trees."""
NAMES_TOKENS = {Kind.GRAMMAR, Kind.STRUCTURAL_TAG}
"""Kinds that may name tokens by number, over which llguidance rolls back wrongly (guidance-ai/llguidance#364)."""


class TreeGrammarOutput(GrammarOutput):
    """Masks of a step, and the grammars that a draft needs to follow them."""

    walks: Mapping[str, GrammarWalk] | None = None
    """Grammars of the requests. They do not leave the scheduler's process: None in a worker elsewhere."""
    first: Mapping[str, int]
    """Index of the first output token that its grammar reads, of each request that does not reason any more."""

    @classmethod
    def of(cls, output: GrammarOutput, manager: Any, requests: Mapping[str, Any]) -> "TreeGrammarOutput":
        """`manager`, `requests`: the scheduler's."""
        under = {name: requests[name] for name in output.structured_output_request_ids}
        words = output.grammar_bitmask.shape[1]
        acceptable = [0 if is_lost(under[name]) else count for name, count in acceptable_of(output).items()]
        first = {
            name: getattr(request.structured_output_request, FIRST, 0)
            for name, request in under.items()
            if manager._get_constraint_bounds(request, []).constraint_start == 0
        }
        tree_output = cls.sent([*under], output.grammar_bitmask, acceptable, first)
        tree_output.walks = {
            name: walk_of(manager, request, words) for name, request in under.items() if not is_lost(request)
        }
        return tree_output

    @classmethod
    def sent(cls, names: list[str], masks: Any, acceptable: Any, first: Mapping[str, int]) -> "TreeGrammarOutput":
        """Output as it arrives in another process."""
        output = cls(names, masks, acceptable)
        output.first = first
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        masks = self.structured_output_request_ids, self.grammar_bitmask, self.num_acceptable_drafts
        return TreeGrammarOutput.sent, (*masks, self.first)


def walk_of(manager: Any, request: Any, words: int, *, failed: Callable[[Exception], Any] | None = None) -> GrammarWalk:
    """Grammar of a scheduler's `request`.

    Args:
        manager: vLLM's StructuredOutputManager.
        words: per mask.
        failed: as of `GrammarWalk`; None: the request is lost to trees.
    """
    state = request.structured_output_request
    grammar, (kind, _) = state.grammar, state.structured_output_key
    reasons = manager._get_constraint_bounds(request, []).constraint_start > 0
    return GrammarWalk(
        grammar,
        lambda path: Bounds(*manager._get_constraint_bounds(request, path)),
        words,
        request=request.request_id,
        rolls_back=not (isinstance(grammar, GuidanceGrammar) and kind in NAMES_TOKENS),
        furthest=manager.vllm_config.num_speculative_tokens if isinstance(grammar, OutlinesGrammar) else None,
        no_ends=masked_ends(manager, request) if reasons else (),
        failed=failed or (lambda error: lose(manager, request, error)),
    )


def is_lost(request: Any) -> bool:
    return getattr(request.structured_output_request, LOST, False)


def lose(manager: Any, request: Any, error: Exception) -> Any:
    """End a request's trees after a fault of its grammar. Where the grammar itself has walked, a new one replaces it
    and reads what the request has put out under it.

    Returns:
        The request's grammar.
    """
    state, name = request.structured_output_request, request.request_id
    setattr(state, LOST, True)
    logger.warning("The grammar of request %s failed on a tree, and is not asked about trees any more: %s", name, error)
    if copying(state.grammar) is None:
        try:
            grammar = manager._create_grammar(request)
            if not state.reasoning_ended or _read(grammar, name, request.output_token_ids[getattr(state, FIRST, 0) :]):
                state.grammar = grammar
        except Exception:
            logger.exception("The grammar of request %s cannot be compiled anew, and stays where it is", name)
    return state.grammar


def tree_masks(
    manager: Any, requests: Mapping[str, Any], names: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> NDArray[np.int32] | None:
    """Replacement of `StructuredOutputManager.grammar_bitmask`: for each of these requests a row for its root and one
    for each draft token, [rows, words], in the order of `names`."""
    if not names:
        return None
    config = manager.vllm_config
    nodes = config.num_speculative_tokens
    if manager._grammar_bitmask is None:
        rows = config.scheduler_config.max_num_seqs * (1 + nodes)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
    first = 0
    for name in names:
        tokens, request = drafts.get(name, ()), requests[name]
        rows_of_request = manager._grammar_bitmask[first : first + 1 + len(tokens)]
        walk_of(manager, request, rows_of_request.shape[1]).fill_tree(
            [-1] * len(tokens) if is_lost(request) else tokens, rows_of_request
        )
        first += mask_rows(len(tokens), nodes)
    masks: NDArray[np.int32] = manager._grammar_bitmask[:first].numpy()
    return masks


def advance(manager: Any, request: Any, tokens: Sequence[int]) -> bool:
    """Replacement of `StructuredOutputManager.accept_tokens`, for tokens that may follow the end of the grammar: some
    backends reject those unless they come alone. Returns whether the grammar accepts the others."""
    if not request.use_structured_output or not tokens:
        return True
    start, _ = manager._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
    if start > len(tokens):
        return True
    state = request.structured_output_request
    if not state.reasoning_ended:
        setattr(state, FIRST, len(request.output_token_ids) - len(tokens) + start)
    state.reasoning_ended = True
    return _read(state.grammar, request.request_id, tokens[start:])


def _read(grammar: Any, name: str, tokens: Sequence[int]) -> bool:
    """Return whether the grammar accepts the tokens, up to its end."""
    return all(grammar.is_terminated() or grammar.accept_tokens(name, [token]) for token in tokens)


def acceptable_of(output: GrammarOutput | None) -> Mapping[str, int]:
    """Draft tokens that may be accepted, of each request with masks: none after a fault of its grammar."""
    if output is None or output.num_acceptable_drafts is None:
        return {}
    return dict(zip(output.structured_output_request_ids, output.num_acceptable_drafts, strict=True))


def masks_of(
    output: GrammarOutput | None, scheduled: Mapping[str, Sequence[int]], verified: Mapping[str, Sequence[int]]
) -> GrammarOutput | None:
    """Masks of the draft tokens that a step verifies, a prefix of those `scheduled` for each request."""
    if output is None or scheduled is verified or MASKED_ENDS:
        return output
    rows, first = list[int](), 0
    for name in output.structured_output_request_ids:
        rows += range(first, first + 1 + len(verified.get(name, ())))
        first += 1 + len(scheduled.get(name, ()))
    return GrammarOutput(output.structured_output_request_ids, output.grammar_bitmask[rows])
