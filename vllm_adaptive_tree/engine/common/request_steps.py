"""What a step has brought to each request, counted in the scheduler, where vLLM counts its drafts.

To the scheduler a draft is a list of tokens. With trees the list says too much: Model Runner V2 reserves
`num_speculative_tokens` places in every step, V1 verifies fewer nodes beside prompts. So vLLM's own figures are told
what was verified, and a step without a tree counts as one without a draft.
"""

from collections import Counter
from typing import Any

from vllm.logger import init_logger

from vllm_adaptive_tree.engine.common.step_figures import SCHEDULER, StepFigures

logger = init_logger(f"vllm.{__name__}")


class RequestSteps:
    def __init__(self, scheduler: Any, scheduled: Any, output: Any):
        """Before `Scheduler.update_from_output(scheduled, output)`; the step's figures in `output` get what is counted.

        `scheduled.num_invalid_spec_tokens`, which vLLM subtracts from the draft tokens that it counts, becomes all that
        was not verified.
        """
        figures, invalid = StepFigures.of(output.cudagraph_stats), dict(scheduled.num_invalid_spec_tokens or {})
        reasons = {row: reason for reason, rows in figures.without.items() for row in rows}
        lengths, fallbacks = Counter[int](), Counter[str]()
        self.undrafted: list[Any] = []
        """Requests with places for draft tokens and no tree."""
        for name, count in scheduled.num_scheduled_tokens.items():
            request, row = scheduler.requests.get(name), output.req_id_to_index[name]
            emitted = len(output.sampled_token_ids[row]) if output.sampled_token_ids else 0
            if request is None or request.is_finished() or _is_dropped(request) or not emitted:
                continue  # as vLLM does
            places = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            nodes = min(figures.rows[row], places - invalid.get(name, 0))
            if places:
                invalid[name] = places - nodes
                if not nodes:
                    self.undrafted.append(request)
            if count - places > 1 or not request.num_output_tokens:
                continue  # it has read its prompt
            lengths[emitted] += 1
            if not nodes:
                fallbacks[reasons.get(row, SCHEDULER)] += 1
        scheduled.num_invalid_spec_tokens = invalid
        figures.steps, figures.tokens = lengths.total(), sum(size * count for size, count in lengths.items())
        depths = range(1, max(lengths, default=1))
        figures.accepted = {str(depth): sum(lengths[size] for size in lengths if size > depth) for depth in depths}
        figures.fallbacks, figures.rows, figures.without = dict(fallbacks), [], {}
        output.cudagraph_stats = figures.stat()

    def correct(self, outputs: dict[int, Any]) -> None:
        """After it: steps without a tree leave no trace in what vLLM has counted."""
        for request in self.undrafted:
            if (metrics := request.spec_decode_metrics) is not None:
                metrics.histogram[0] -= 1
                if metrics.per_step_accepted:
                    metrics.per_step_accepted.pop()
                    metrics.per_step_drafted.pop()
        for one in outputs.values():
            if one.scheduler_stats is not None and (drafts := one.scheduler_stats.spec_decoding_stats) is not None:
                drafts.num_drafts -= len(self.undrafted)
                if not drafts.num_drafts:
                    one.scheduler_stats.spec_decoding_stats = None


def _is_dropped(request: Any) -> bool:
    """Whether vLLM ignores what the request has been given, since it was preempted meanwhile."""
    return bool(request.drop_stale_output and request.num_stale_output_tokens > 0)


def request_steps(scheduler: Any, scheduled: Any, output: Any) -> RequestSteps | None:
    """Of a step with a tree method's figures. If they cannot be read, vLLM's stay those of the scheduler."""
    if output.cudagraph_stats is None:
        return None
    try:
        return RequestSteps(scheduler, scheduled, output)
    except Exception:
        logger.exception(
            "The statistics of a step cannot be read; vllm:spec_decode_* count the places for draft tokens"
        )
        return None
