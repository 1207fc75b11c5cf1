"""Tokens whose K/V a KV connector has brought into the cache.

A connector keeps the draft's K/V as it keeps the target's, but a draft that rests has none for it: a prefill instance
never drafts, and an offloaded block may be of steps at rest. So a draft that reads tokens alone reads loaded ones anew.
"""

from typing import Any

from vllm_adaptive_tree.engine.names import LOADED


def note_loaded(new: Any, request: Any) -> None:
    """Note on the NewRequestData of a `request` how many of its computed tokens, the last, may be loaded. After a
    preemption the scheduler no longer knows, and all may be. Of a whole prompt, and of a load that has failed, fewer
    are computed than were loaded."""
    stats, loaded = request.prefill_stats, new.num_computed_tokens
    if stats is not None and not request.num_preemptions:
        loaded = min(stats.num_external_cached_tokens, loaded)
    if loaded:
        setattr(new, LOADED, loaded)


def num_loaded(new: Any) -> int:
    """How many of the computed tokens of a NewRequestData, the last, may be loaded where there is a connector."""
    count: int = getattr(new, LOADED, 0)
    return count


def first_loaded(scheduled: Any) -> dict[str, int]:
    """First position that may be loaded, of each request of a SchedulerOutput that comes, or comes back, with any."""
    first = {new.req_id: new.num_computed_tokens - num_loaded(new) for new in scheduled.scheduled_new_reqs}
    return first | dict.fromkeys(scheduled.scheduled_cached_reqs.resumed_req_ids, 0)


def without_failed_loads(scheduler: Any, drafts: Any) -> Any:
    """DraftTokenIds of a step, without tokens for requests that a failed load has set back: their samples are not kept,
    and vLLM would have the tokens verified after the prompts."""
    if scheduler.connector is None or drafts is None:
        return drafts
    for index, name in enumerate(drafts.req_ids):
        request = scheduler.requests.get(name)
        if request is not None and request.num_computed_tokens < request.num_tokens - 1:
            drafts.draft_token_ids[index] = []
    return drafts
