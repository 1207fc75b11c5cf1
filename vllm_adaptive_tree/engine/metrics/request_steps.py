"""Corrects vLLM's spec-decode counters to verified nodes, in the scheduler, where vLLM counts its drafts.

To the scheduler a draft is a list of tokens, and with trees that list is too long: Model Runner V2 reserves
`num_speculative_tokens` places in every step, V1 verifies fewer nodes beside prompts. So vLLM's counters get the
verified nodes, and a step without a tree counts as one without a draft.
"""

from collections import Counter
from typing import Any

from vllm.logger import init_logger

from vllm_adaptive_tree.engine.common.request_options import RequestOptions
from vllm_adaptive_tree.engine.grammar.structured_outputs import is_lost
from vllm_adaptive_tree.engine.metrics.acceptance_alarm import AcceptanceAlarm, is_telling
from vllm_adaptive_tree.engine.metrics.acceptance_record import acceptance_alarm
from vllm_adaptive_tree.engine.metrics.step_figures import GRAMMAR, REQUEST, SCHEDULER, StepFigures

logger = init_logger(f"vllm.{__name__}")

ALARM = "adaptive_tree_alarm"
"""Attribute of a scheduler: its AcceptanceAlarm, or None."""


class RequestSteps:
    def __init__(self, scheduler: Any, scheduled: Any, output: Any):
        """Runs before `Scheduler.update_from_output(scheduled, output)`; adds its counts to the figures in `output`.

        `scheduled.num_invalid_spec_tokens`, which vLLM subtracts from the draft tokens that it counts, becomes the
        number that was not verified.
        """
        figures, invalid = StepFigures.of(output.cudagraph_stats), dict(scheduled.num_invalid_spec_tokens or {})
        lengths, fallbacks, asked = Counter[int](), Counter[str](), Counter[str]()
        self.undrafted: list[Any] = []
        """Requests with places for draft tokens and no tree."""
        self.alarm = _alarm_of(scheduler)
        self.accepts: dict[str, bool] = {}
        """Requests whose step says something about the draft -> True if a node at depth 1 was accepted."""
        requests, rows, sampled = scheduler.requests, output.req_id_to_index, output.sampled_token_ids
        drafts = scheduled.scheduled_spec_decode_tokens
        for name, count in scheduled.num_scheduled_tokens.items():
            row = rows[name]
            emitted = len(sampled[row]) if sampled else 0
            if not emitted or (request := requests.get(name)) is None or request.is_finished() or _is_dropped(request):
                continue  # as vLLM does
            places = len(drafts.get(name, ()))
            nodes = min(figures.rows[row], places - invalid.get(name, 0))
            if places:
                invalid[name] = places - nodes
                if not nodes:
                    self.undrafted.append(request)
            decodes = request.num_output_tokens > 0
            if not decodes:
                asked.update(RequestOptions.of(request.sampling_params).names)
            if count - places > 1 or not decodes:
                continue  # it was still reading its prompt
            lengths[emitted] += 1
            if not nodes:
                why = GRAMMAR if is_lost(request) else figures.fallback_reasons[row] or SCHEDULER
                fallbacks[REQUEST if RequestOptions.of(request.sampling_params).nodes == 0 else why] += 1
            elif not figures.has_lookup_trees and is_telling(request):
                self.accepts[name] = emitted > 1
        scheduled.num_invalid_spec_tokens = invalid
        figures.steps, figures.tokens = lengths.total(), sum(size * count for size, count in lengths.items())
        depths = range(1, max(lengths, default=1))
        if self.alarm is not None:
            figures.gauges["low_acceptance"] = float(self.alarm.low)
        figures.accepted = {str(depth): sum(lengths[size] for size in lengths if size > depth) for depth in depths}
        figures.fallbacks, figures.asked = dict(fallbacks), dict(asked)
        figures.rows, figures.fallback_reasons = [], []
        output.cudagraph_stats = figures.stat()

    def correct(self, outputs: dict[int, Any]) -> None:
        """Remove steps without a tree from vLLM's counts, after the update, and pass the others to the alarm. A request
        that ends after one token is left out: it is unknown if a node would have been accepted after it."""
        ended = {
            output.request_id
            for client in outputs.values()
            for output in client.outputs
            if output.finish_reason is not None
        }
        if self.alarm is not None:
            for name, accepted in self.accepts.items():
                if accepted or name not in ended:
                    self.alarm.see(name, accepted=accepted)
        for request in self.undrafted:
            if (metrics := request.spec_decode_metrics) is not None:
                metrics.histogram[0] -= 1
                if metrics.per_step_accepted:
                    metrics.per_step_accepted.pop()
                    metrics.per_step_drafted.pop()
        for client_outputs in outputs.values():
            if (
                client_outputs.scheduler_stats is not None
                and (drafts := client_outputs.scheduler_stats.spec_decoding_stats) is not None
            ):
                drafts.num_drafts -= len(self.undrafted)
                if not drafts.num_drafts:
                    client_outputs.scheduler_stats.spec_decoding_stats = None


def _alarm_of(scheduler: Any) -> AcceptanceAlarm | None:
    """Alarm of an engine, which its `scheduler` keeps."""
    if not hasattr(scheduler, ALARM):
        setattr(scheduler, ALARM, None)  # also where it cannot be made
        setattr(scheduler, ALARM, acceptance_alarm(scheduler.vllm_config))
    alarm: AcceptanceAlarm | None = getattr(scheduler, ALARM)
    return alarm


def _is_dropped(request: Any) -> bool:
    """Return whether vLLM drops this step's tokens of the request, which was preempted meanwhile."""
    return bool(request.drop_stale_output and request.num_stale_output_tokens > 0)


def request_steps(scheduler: Any, scheduled: Any, output: Any) -> RequestSteps | None:
    """Counts of a step that has a tree method's figures. If they cannot be read, vLLM's counts stay uncorrected."""
    if output.cudagraph_stats is None:
        return None
    try:
        return RequestSteps(scheduler, scheduled, output)
    except Exception:
        logger.exception(
            "The statistics of a step cannot be read; vllm:spec_decode_* count the places for draft tokens"
        )
        return None
