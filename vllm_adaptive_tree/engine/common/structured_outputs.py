"""What vLLM's scheduler asks its grammars about trees."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.backend_outlines import OutlinesGrammar

from vllm_adaptive_tree.engine.common.grammar import Bounds, GrammarWalk


class TreeGrammarOutput(GrammarOutput):
    """The masks of a step, and the grammars that they were made with, for a worker in the scheduler's process. They do
    not leave it: a worker elsewhere gets the masks."""

    walks: Mapping[str, GrammarWalk]

    @classmethod
    def of(cls, output: GrammarOutput, walks: Mapping[str, GrammarWalk]) -> "TreeGrammarOutput":
        own = cls(output.structured_output_request_ids, output.grammar_bitmask, output.num_acceptable_drafts)
        own.walks = walks
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        return GrammarOutput, (self.structured_output_request_ids, self.grammar_bitmask, self.num_acceptable_drafts)


def walk_of(manager: Any, request: Any) -> GrammarWalk:
    """The grammar of a scheduler's `request`. `manager`: vLLM's StructuredOutputManager, which has made a mask."""
    grammar = request.structured_output_request.grammar
    return GrammarWalk(
        grammar,
        lambda path: Bounds(*manager._get_constraint_bounds(request, path)),
        manager._grammar_bitmask.shape[1],
        request=request.request_id,
        furthest=manager.vllm_config.num_speculative_tokens if isinstance(grammar, OutlinesGrammar) else None,
    )


def tree_masks(
    manager: Any, requests: Mapping[str, Any], names: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> NDArray[np.int32] | None:
    """In place of `StructuredOutputManager.grammar_bitmask`: for each of these requests a row for its root and one for
    each draft token, [rows, words], in the order of `names`."""
    if not names:
        return None
    if manager._grammar_bitmask is None:
        config = manager.vllm_config
        rows = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
    first = 0
    for name in names:
        tokens = drafts.get(name, ())
        end = first + 1 + len(tokens)
        walk_of(manager, requests[name]).fill_tree(tokens, manager._grammar_bitmask[first:end])
        first = end
    masks: NDArray[np.int32] = manager._grammar_bitmask[:first].numpy()
    return masks


def masks_of(
    output: GrammarOutput | None, scheduled: Mapping[str, Sequence[int]], verified: Mapping[str, Sequence[int]]
) -> GrammarOutput | None:
    """The masks of the draft tokens that a step verifies, a prefix of those `scheduled` for each request."""
    if output is None or scheduled is verified:
        return output
    rows, first = list[int](), 0
    for name in output.structured_output_request_ids:
        rows += range(first, first + 1 + len(verified.get(name, ())))
        first += 1 + len(scheduled.get(name, ()))
    return GrammarOutput(output.structured_output_request_ids, output.grammar_bitmask[rows])
