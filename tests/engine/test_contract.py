"""The checks of `docs/contract.md` see a fault of each clause; every other engine test passes them as it runs."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine import contract
from tests.engine.contract import CLAUSES, Step
from tests.engine.engines import PROMPTS, V2, Engines, generate, tree
from vllm_adaptive_tree.engine.metrics.request_steps import request_steps
from vllm_adaptive_tree.engine.metrics.step_figures import StepFigures

DOCUMENT = Path(__file__).parents[2] / "docs" / "contract.md"


def test_every_clause_is_in_the_document() -> None:
    assert {*re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)} == CLAUSES


@pytest.mark.skipif(not V2, reason="a process that a test starts on Model Runner V1 runs no code of the tests")
def test_a_process_of_its_own_checks_too() -> None:
    said = "import vllm.v1.core.sched.scheduler as it; print(it.Scheduler.__init__.__wrapped__.__qualname__)"
    run = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "Scheduler.__init__"


@pytest.mark.skipif(V2, reason="the scheduler is the same")
@pytest.mark.skipif(not vllm.__version__.startswith("0.32"), reason="vLLM 0.33 counts no token past a stop as computed")
def test_tokens_past_a_stop_count_as_computed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `keep_delivered`, vLLM's own update leaves a request ahead of its tokens: the fault of sessions."""
    llm = engines.start(tree(8))

    def answers(**more: Any) -> list[Any]:
        return generate(llm, PROMPTS[:3], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **more))

    original: Any = Scheduler.update_from_output.__wrapped__  # type: ignore[attr-defined]

    def without_cut(scheduler: Any, scheduled: Any, output: Any) -> Any:
        steps = request_steps(scheduler, scheduled, output)
        outputs = original(scheduler, scheduled, output)
        if steps is not None:
            steps.correct(outputs)
        return outputs

    stops = sorted({token for output in answers() for token in output.token_ids})
    for stop in stops[:4]:
        answers(stop_token_ids=[stop])
    monkeypatch.setattr(Scheduler, "update_from_output", without_cut)
    with pytest.raises(AssertionError, match=r"\d+ computed of \d+"):
        [answers(stop_token_ids=[stop]) for stop in stops]


def made() -> Step:
    """A step of two requests with six tokens each, in blocks of two; "a" has accepted one of its nodes."""

    def request() -> Any:
        numbers = {"num_computed_tokens": 7, "num_prompt_tokens": 6, "num_tokens": 8, "num_output_tokens": 2}
        more = {"max_tokens": 9, "num_output_placeholders": 0, "num_stale_output_tokens": 0, "block_hashes": [b""] * 3}
        return Made(request_id="a", **numbers, **more)

    requests = {"a": request(), "b": request()}
    manager = Made(
        block_size=2, req_to_blocks={"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}, num_cached_block={"a": 3, "b": 3}
    )
    figures = StepFigures(steps=2, tokens=3, accepted={"1": 1})
    output = Made(
        req_ids=["a", "b"],
        req_id_to_index={"a": 0, "b": 1},
        sampled_token_ids=[[10, 13], [20]],
        cudagraph_stats=figures.stat(),
    )
    scheduled = Made(
        num_scheduled_tokens={"a": 3, "b": 3},
        scheduled_spec_decode_tokens={"a": [10, 11], "b": [21, 22]},
        num_invalid_spec_tokens={},
    )
    scheduler = Made(
        connector=None,
        vllm_config=Made(model_config=Made(get_vocab_size=lambda: 100)),
        kv_cache_manager=Made(coordinator=Made(single_type_managers=[manager])),
        requests=dict(requests),
        hash_block_size=2,
        defer_block_free=False,
        max_model_len=20,
        num_spec_tokens=2,
    )
    return Step(scheduler, scheduled, output, requests)


def managers(step: Step) -> Any:
    return step.scheduler.kv_cache_manager.coordinator.single_type_managers[0]


def miscounted(step: Step) -> None:
    figures = StepFigures.of(step.output.cudagraph_stats)
    figures.tokens += 1
    step.output.cudagraph_stats = figures.stat()


FAULTS: dict[str, list[Callable[[Step], Any]]] = {
    "rows": [lambda step: step.output.req_ids.pop(), lambda step: step.output.req_ids.reverse()],
    "paths": [
        lambda step: step.output.sampled_token_ids.reverse(),
        lambda step: step.output.sampled_token_ids[1].extend([22, 20, 20]),
        lambda step: step.output.sampled_token_ids.__setitem__(1, [100]),
    ],
    "figures": [miscounted, lambda step: step.scheduled.num_invalid_spec_tokens.update(a=2)],
    "blocks": [lambda step: managers(step).req_to_blocks["a"].pop(), lambda step: step.scheduler.requests.pop("a")],
    "prefixes": [
        lambda step: managers(step).num_cached_block.update(a=4),
        lambda step: step.requests["a"].block_hashes.extend([b""] * 2),
    ],
}


@pytest.mark.parametrize(("clause", "fault"), [(clause, fault) for clause, some in FAULTS.items() for fault in some])
def test_faults_of_a_step(clause: str, fault: Callable[[Step], Any]) -> None:
    step = made()
    for check in (*contract.BEFORE, *contract.AFTER):
        check(step)
    fault(step)
    with pytest.raises(AssertionError):
        getattr(contract, clause)(step)


@pytest.mark.parametrize(
    "change",
    [{"num_computed_tokens": 8}, {"num_output_tokens": 10}, {"num_tokens": 21}, {"num_output_placeholders": -1}],
)
def test_faults_of_a_request(change: dict[str, int]) -> None:
    step = made()
    contract.computed(step.scheduler, step.requests["a"])
    vars(step.requests["a"]).update(change)
    with pytest.raises(AssertionError):
        contract.computed(step.scheduler, step.requests["a"])


@pytest.mark.parametrize("drafts", [[[1, 2, 3], []], [[-1, 2], []], [[100], []], [[]]])
def test_faults_of_an_offer(drafts: list[list[int]]) -> None:
    scheduler = made().scheduler
    contract.offers(scheduler, Made(req_ids=["a", "b"], draft_token_ids=[[1, 2], [3, -1]]))
    with pytest.raises(AssertionError):
        contract.offers(scheduler, Made(req_ids=["a", "b"], draft_token_ids=drafts))
