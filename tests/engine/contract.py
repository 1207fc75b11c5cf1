"""The clauses of `docs/contract.md`, asserted at every step of every engine in this process.

`install` wraps `Scheduler.__init__`: a scheduler of a tree method gets checks around its own methods, ours included.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_adaptive_tree.engine.metrics.step_figures import StepFigures
from vllm_adaptive_tree.engine.names import MARK


class Step(NamedTuple):
    """A step of a `scheduler`: what it scheduled, the worker's output, and the requests that took part."""

    scheduler: Any
    scheduled: Any
    output: Any
    requests: dict[str, Any]

    def sampled(self, name: str) -> list[int]:
        tokens, row = self.output.sampled_token_ids, self.output.req_id_to_index[name]
        return list(tokens[row]) if tokens else []


def rows(step: Step) -> None:
    """The output has the scheduled requests, each once."""
    names = step.output.req_ids
    assert sorted(names) == sorted(step.scheduled.num_scheduled_tokens), "requests"
    assert [step.output.req_id_to_index[name] for name in names] == [*range(len(names))], "their rows"
    assert len(step.output.sampled_token_ids) in (0, len(names)), "rows of tokens"


def paths(step: Step) -> None:
    """A request emits a path of its tree and one more token, all of the vocabulary."""
    size = step.scheduler.vllm_config.model_config.get_vocab_size()
    for name in step.requests:
        tokens, drafts = step.sampled(name), step.scheduled.scheduled_spec_decode_tokens.get(name, [])
        assert len(tokens) <= 1 + len(drafts), f"{name} emits {tokens} of {drafts}"
        assert all(0 <= token < size for token in tokens), f"{name} emits {tokens}"
        if drafts and max(drafts) >= 0:  # else places, whose tokens only the device knows
            assert {*tokens[:-1]} <= {*drafts}, f"{name} emits {tokens} of {drafts}"


def figures(step: Step) -> None:
    """The figures of a step count what its requests got, and vLLM's the nodes that were verified."""
    if step.output.cudagraph_stats is None:
        assert not any(map(step.sampled, step.requests)), "tokens without figures"
        return
    found = StepFigures.of(step.output.cudagraph_stats)
    assert found.tokens == found.steps + sum(found.accepted.values()), f"{found}"
    assert sum(found.fallbacks.values()) <= found.steps, f"{found}"
    assert not found.rows, "the scheduler has not read them"
    for name, places in step.scheduled.scheduled_spec_decode_tokens.items():
        invalid = (step.scheduled.num_invalid_spec_tokens or {}).get(name, 0)
        if name in step.requests:
            assert max(0, len(step.sampled(name)) - 1) <= len(places) - invalid <= len(places), f"{name} {found}"


def blocks(step: Step) -> None:
    """A request holds blocks for all its computed tokens; one that has left holds none."""
    for name, request in step.requests.items():
        for manager in step.scheduler.kv_cache_manager.coordinator.single_type_managers:
            held = len(manager.req_to_blocks.get(name, ()))
            if name in step.scheduler.requests:
                assert held * manager.block_size >= request.num_computed_tokens or not held, f"{name} {held}"
            elif not step.scheduler.defer_block_free:
                assert not held, f"{name} has left and holds {held} blocks"


def prefixes(step: Step) -> None:
    """Blocks in the prefix cache hold computed tokens alone, and no hash is of a token that was not accepted. The place
    of the token that follows a prompt is not among the computed ones."""
    for name, request in step.requests.items():
        done = request.num_computed_tokens
        if step.scheduler.connector is not None and done < request.num_tokens - 1:
            continue  # a load has failed: vLLM evicts the blocks, and counts them until they are read again
        settled = max(done - request.num_output_placeholders, min(done, request.num_prompt_tokens))
        for manager in step.scheduler.kv_cache_manager.coordinator.single_type_managers:
            cached = manager.num_cached_block.get(name, 0) * manager.block_size
            assert cached <= max(settled, 0) or request.num_stale_output_tokens, f"{name} {cached} of {settled}"
        assert len(request.block_hashes) * step.scheduler.hash_block_size <= request.num_tokens, f"{name}"


def computed(scheduler: Any, request: Any) -> None:
    """Once a step's tokens are appended, the last one is not computed, whether the request goes on or stops."""
    settled = request.num_computed_tokens - request.num_output_placeholders
    assert settled <= request.num_tokens - 1, f"{request.request_id}: {settled} computed of {request.num_tokens}"
    assert request.num_output_tokens <= request.max_tokens, f"{request.request_id}"
    assert request.num_tokens <= scheduler.max_model_len, f"{request.request_id}"


def offers(scheduler: Any, drafted: Any) -> None:
    """The worker offers each request at most its nodes, tokens of the vocabulary, without a gap."""
    size = scheduler.vllm_config.model_config.get_vocab_size()
    assert len({*drafted.req_ids}) == len(drafted.req_ids) == len(drafted.draft_token_ids), "requests"
    for name, tokens in zip(drafted.req_ids, drafted.draft_token_ids, strict=True):
        nodes = [token for token in tokens if token >= 0]
        assert len(tokens) <= scheduler.num_spec_tokens, f"{name} has {len(tokens)} nodes"
        assert [*tokens[: len(nodes)]] == nodes, f"{name} has a gap: {tokens}"
        assert all(token < size for token in nodes), f"{name} {tokens}"


BEFORE: tuple[Callable[[Step], None], ...] = rows, paths
AFTER: tuple[Callable[[Step], None], ...] = figures, blocks, prefixes
CLAUSES = {clause.__name__ for clause in (*BEFORE, *AFTER, computed, offers)}


def install() -> None:
    original = Scheduler.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self.vllm_config.speculative_config, MARK, None):
            _check(self)

    Scheduler.__init__ = init


def is_checked(scheduler: Any) -> bool:
    return "update_from_output" in vars(scheduler)


def _check(scheduler: Any) -> None:
    """Put the clauses around the methods of a scheduler; a test may still replace those of its class."""

    def update_from_output(scheduled: Any, output: Any) -> Any:
        alive = {name: scheduler.requests.get(name) for name in scheduled.num_scheduled_tokens}
        taking = {
            name: request
            for name, request in alive.items()
            if request is not None and not request.is_finished() and not request.num_stale_output_tokens
        }
        step = Step(scheduler, scheduled, output, taking)
        for clause in BEFORE:
            clause(step)
        outputs = type(scheduler).update_from_output(scheduler, scheduled, output)
        for clause in AFTER:
            clause(step)
        return outputs

    def update_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(scheduler)._update_request_with_output(scheduler, request, *args, **kwargs)
        if not request.num_stale_output_tokens:
            computed(scheduler, request)
        return found

    def update_draft_token_ids(drafted: Any) -> None:
        offers(scheduler, drafted)
        type(scheduler).update_draft_token_ids(scheduler, drafted)

    def update_draft_token_ids_in_output(drafted: Any, scheduled: Any) -> None:
        offers(scheduler, drafted)
        type(scheduler).update_draft_token_ids_in_output(scheduler, drafted, scheduled)

    scheduler.update_from_output, scheduler._update_request_with_output = update_from_output, update_request
    scheduler.update_draft_token_ids = update_draft_token_ids
    scheduler.update_draft_token_ids_in_output = update_draft_token_ids_in_output
