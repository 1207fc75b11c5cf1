"""The scheduler's output: trees cut to what a step with prompts affords, and the drafts of the tokens that it kept."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_adaptive_tree.engine.common.step_figures import BUDGET, DRAFT, SCHEDULER
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.drafts import Draft


def affordable(scheduled: SchedulerOutput, drafts: Mapping[str, Draft], budget: HostBudget | None) -> SchedulerOutput:
    """The step with fewer nodes if it also reads prompts, which was unknown when the trees were drafted. To the
    scheduler, with its own list, the others are rejected."""
    spec, rows = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
    if budget is None or not spec or scheduled.total_num_scheduled_tokens == len(rows) + sum(map(len, spec.values())):
        return scheduled
    others = scheduled.total_num_scheduled_tokens - sum(rows[name] for name in spec)
    counts = budget.with_prompts([drafts[name].prefix(len(tokens)) for name, tokens in spec.items()], others)
    kept = {name: tokens[:count] for (name, tokens), count in zip(spec.items(), counts, strict=True)}
    fewer = {name: count - len(spec.get(name, ())) + len(kept.get(name, ())) for name, count in rows.items()}
    return replace(
        scheduled,
        scheduled_spec_decode_tokens={name: tokens for name, tokens in kept.items() if tokens},
        num_scheduled_tokens=fewer,
        total_num_scheduled_tokens=sum(fewer.values()),
    )


def without_tree(
    names: Sequence[str],
    trees: Mapping[str, list[int]],
    offered: Collection[str],
    drafts: Mapping[str, Draft | None],
    why: Mapping[str, str],
) -> dict[str, list[int]]:
    """Reason -> rows of a step's requests without a tree.

    Args:
        names: of the batch, by row.
        trees: tokens of those that are verified.
        offered: requests that the scheduler gave draft tokens.
        drafts: what was drafted for them.
        why: of those for which nothing was left after drafting.
    """
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name in trees:
            continue
        draft = drafts.get(name)
        reason = why.get(name, DRAFT)
        if draft is not None and len(draft.tree):
            reason = BUDGET if name in offered else SCHEDULER
        found.setdefault(reason, []).append(row)
    return found


def scheduled_draft(draft: Draft | None, tokens: list[int], request: str) -> Draft:
    """The draft of the tokens that the scheduler kept: a prefix of what was drafted."""
    if draft is not None and draft.tree.tokens[: len(tokens)] == tuple(tokens):
        return draft.prefix(len(tokens))
    raise RuntimeError(f"request {request}: scheduled draft tokens {tokens} are not those of its tree {draft}")
