"""What vLLM's scheduler asks its grammars about trees."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.backend_outlines import OutlinesGrammar

from vllm_adaptive_tree.engine.common.grammar import Bounds, GrammarWalk
from vllm_adaptive_tree.engine.vllm_api import MASKED_ENDS, mask_rows, masked_ends

FIRST = "adaptive_tree_first"
"""Of a request's StructuredOutputRequest: which of its output tokens is the first that the grammar reads, unless 0."""


class TreeGrammarOutput(GrammarOutput):
    """The masks of a step, and what a draft needs to follow the grammars that they were made with."""

    walks: Mapping[str, GrammarWalk] | None = None
    """The grammars themselves. They do not leave the scheduler's process: None in a worker elsewhere."""
    first: Mapping[str, int]
    """Of each request that does not reason any more, the first of its output tokens that its grammar reads."""

    @classmethod
    def of(cls, output: GrammarOutput, manager: Any, requests: Mapping[str, Any]) -> "TreeGrammarOutput":
        """`manager`, `requests`: the scheduler's."""
        under = {name: requests[name] for name in output.structured_output_request_ids}
        words = output.grammar_bitmask.shape[1]
        first = {
            name: getattr(request.structured_output_request, FIRST, 0)
            for name, request in under.items()
            if manager._get_constraint_bounds(request, []).constraint_start == 0
        }
        own = cls.sent([*under], output.grammar_bitmask, output.num_acceptable_drafts, first)
        own.walks = {name: walk_of(manager, request, words) for name, request in under.items()}
        return own

    @classmethod
    def sent(cls, names: list[str], masks: Any, acceptable: Any, first: Mapping[str, int]) -> "TreeGrammarOutput":
        """As it arrives in another process."""
        own = cls(names, masks, acceptable)
        own.first = first
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        masks = self.structured_output_request_ids, self.grammar_bitmask, self.num_acceptable_drafts
        return TreeGrammarOutput.sent, (*masks, self.first)


def walk_of(manager: Any, request: Any, words: int) -> GrammarWalk:
    """The grammar of a scheduler's `request`. `manager`: vLLM's StructuredOutputManager; `words`: of a mask."""
    grammar = request.structured_output_request.grammar
    reasons = manager._get_constraint_bounds(request, []).constraint_start > 0
    return GrammarWalk(
        grammar,
        lambda path: Bounds(*manager._get_constraint_bounds(request, path)),
        words,
        request=request.request_id,
        furthest=manager.vllm_config.num_speculative_tokens if isinstance(grammar, OutlinesGrammar) else None,
        no_ends=masked_ends(manager, request) if reasons else (),
    )


def tree_masks(
    manager: Any, requests: Mapping[str, Any], names: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> NDArray[np.int32] | None:
    """In place of `StructuredOutputManager.grammar_bitmask`: for each of these requests a row for its root and one for
    each draft token, [rows, words], in the order of `names`."""
    if not names:
        return None
    config = manager.vllm_config
    nodes = config.num_speculative_tokens
    if manager._grammar_bitmask is None:
        rows = config.scheduler_config.max_num_seqs * (1 + nodes)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
    first = 0
    for name in names:
        tokens = drafts.get(name, ())
        own = manager._grammar_bitmask[first : first + 1 + len(tokens)]
        walk_of(manager, requests[name], own.shape[1]).fill_tree(tokens, own)
        first += mask_rows(len(tokens), nodes)
    masks: NDArray[np.int32] = manager._grammar_bitmask[:first].numpy()
    return masks


def advance(manager: Any, request: Any, tokens: Sequence[int]) -> bool:
    """In place of `StructuredOutputManager.accept_tokens`, for tokens that may follow the end of the grammar: some
    backends reject those unless they come alone. Whether the grammar accepts the others."""
    if not request.use_structured_output or not tokens:
        return True
    start, _ = manager._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
    if start > len(tokens):
        return True
    own = request.structured_output_request
    if not own.reasoning_ended:
        setattr(own, FIRST, len(request.output_token_ids) - len(tokens) + start)
    own.reasoning_ended, grammar = True, own.grammar
    return all(
        grammar.is_terminated() or grammar.accept_tokens(request.request_id, [token]) for token in tokens[start:]
    )


def masks_of(
    output: GrammarOutput | None, scheduled: Mapping[str, Sequence[int]], verified: Mapping[str, Sequence[int]]
) -> GrammarOutput | None:
    """The masks of the draft tokens that a step verifies, a prefix of those `scheduled` for each request."""
    if output is None or scheduled is verified or MASKED_ENDS:
        return output
    rows, first = list[int](), 0
    for name in output.structured_output_request_ids:
        rows += range(first, first + 1 + len(verified.get(name, ())))
        first += 1 + len(scheduled.get(name, ()))
    return GrammarOutput(output.structured_output_request_ids, output.grammar_bitmask[rows])
