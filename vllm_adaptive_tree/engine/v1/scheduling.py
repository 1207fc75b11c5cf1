"""The scheduler's output: trees cut to the budget of a step with prompts, and the drafts of the tokens that it kept."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_adaptive_tree.engine.metrics.step_figures import BUDGET, DRAFT, SCHEDULER
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.drafts import Draft


def without_placeholders(scheduled: SchedulerOutput) -> SchedulerOutput:
    """Leave out the draft tokens -1 with which vLLM pads a request that has one token left of its prompt, unless there
    is a schedule by batch sizes: it may drop ours, as it checks the configuration anew in some processes."""
    spec = scheduled.scheduled_spec_decode_tokens
    if all(tokens[0] >= 0 for tokens in spec.values()):
        return scheduled
    return _cut(scheduled, {name: len(tokens) if tokens[0] >= 0 else 0 for name, tokens in spec.items()})


def affordable(
    scheduled: SchedulerOutput, drafts: Mapping[str, Draft], budget: HostBudget | None, *, full: int
) -> SchedulerOutput:
    """Cut the nodes of a step that also reads prompts, which was unknown when the trees were drafted. The scheduler,
    which keeps its own list, counts the cut nodes as rejected. `full`: rows of the largest step."""
    spec, rows = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
    if budget is None or not spec or scheduled.total_num_scheduled_tokens == len(rows) + sum(map(len, spec.values())):
        return scheduled
    num_other_rows = scheduled.total_num_scheduled_tokens - sum(rows[name] for name in spec)
    offered = [drafts[name].prefix(len(tokens)) for name, tokens in spec.items()]
    counts = budget.with_prompts(offered, num_other_rows, full=full)
    return _cut(scheduled, dict(zip(spec, counts, strict=True)))


def _cut(scheduled: SchedulerOutput, counts: Mapping[str, int]) -> SchedulerOutput:
    """Scheduler's output with so many draft tokens of each request."""
    spec, rows = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
    kept = {name: tokens[: counts[name]] for name, tokens in spec.items()}
    fewer = {name: count - len(spec.get(name, ())) + len(kept.get(name, ())) for name, count in rows.items()}
    return replace(
        scheduled,
        scheduled_spec_decode_tokens={name: tokens for name, tokens in kept.items() if tokens},
        num_scheduled_tokens=fewer,
        total_num_scheduled_tokens=sum(fewer.values()),
    )


def reasons_without_tree(
    names: Sequence[str],
    trees: Mapping[str, list[int]],
    offered: Collection[str],
    drafts: Mapping[str, Draft | None],
    why: Mapping[str, str],
) -> list[str]:
    """Reason of each request of a step without a tree; "" of the others.

    Args:
        names: of the batch, by row.
        trees: tokens of those that are verified.
        offered: requests that the scheduler gave draft tokens.
        drafts: their drafts, by request.
        why: reason of those for which nothing was left after drafting.
    """

    def reason(name: str) -> str:
        draft = drafts.get(name)
        if draft is None or not len(draft.tree):
            return why.get(name, DRAFT)
        return BUDGET if name in offered else SCHEDULER

    return ["" if name in trees else reason(name) for name in names]


def scheduled_draft(draft: Draft | None, tokens: list[int], request: str) -> Draft:
    """Draft of the tokens that the scheduler kept: a prefix of the drafted ones."""
    if draft is not None and draft.tree.tokens[: len(tokens)] == tuple(tokens):
        return draft.prefix(len(tokens))
    raise RuntimeError(f"request {request}: scheduled draft tokens {tokens} are not those of its tree {draft}")
