"""Tokens past a stop inside an accepted path."""

from typing import Any

from vllm.v1.core.sched.utils import check_stop


def keep_delivered(scheduler: Any, scheduled: Any, output: Any) -> None:
    """Remove from a step's `output` the tokens that no request gets: those after the one that stops it.

    Before `Scheduler.update_from_output(scheduled, output)`, which would cut them too, but only after it has counted
    them as accepted, and in vLLM 0.32 as computed. A session of streaming input continues after a stop, and would go on
    from a position in the cache that its tokens never reached.
    """
    if not output.sampled_token_ids:
        return
    requests, row = scheduler.requests, output.req_id_to_index
    for name in scheduled.num_scheduled_tokens:
        if name not in row or len(tokens := output.sampled_token_ids[row[name]]) < 2:
            continue
        request = requests.get(name)
        if request is None or request.is_finished():
            continue
        if may_stop(request, tokens, scheduler.max_model_len):
            del tokens[delivered(request, tokens, scheduler.max_model_len) :]


def may_stop(request: Any, tokens: list[int], max_model_len: int) -> bool:
    """False if no token before the last can stop the request: the common case, in a microsecond."""
    params = request.sampling_params
    room = min(max_model_len - request.num_tokens, request.max_tokens - request.num_output_tokens)
    return (
        len(tokens) > room
        or params.repetition_detection is not None
        or params.eos_token_id in tokens
        or any(stop in tokens for stop in params.stop_token_ids or ())
    )


def delivered(request: Any, tokens: list[int], max_model_len: int) -> int:
    """Number of `tokens` that a scheduler's `request` gets: up to the first that stops it."""
    ahead = _Ahead(request)
    for count, token in enumerate(tokens, 1):
        ahead.append(token)
        if check_stop(ahead, max_model_len):
            return count
    return len(tokens)


class _Ahead:
    """View of a request with tokens that it has not been given yet; `check_stop` changes this and not the request."""

    def __init__(self, request: Any):
        self.request = request
        self.num_tokens, self.num_output_tokens = request.num_tokens, request.num_output_tokens
        repetition = request.sampling_params.repetition_detection is not None  # reads more than the last token
        self.output_token_ids: list[int] = list(request.output_token_ids) if repetition else []

    def append(self, token: int) -> None:
        self.output_token_ids.append(token)
        self.num_tokens += 1
        self.num_output_tokens += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)
