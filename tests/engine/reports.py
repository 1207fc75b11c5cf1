"""Reports of users, and their trial: the same requests with trees and without, in engines that rows share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.reader import get_metrics_snapshot

from tests.engine.conversations import Answer, Conversation, Request, Server, serve
from tests.engine.engines import TARGET, Engines, TreeSpy, runner_of
from tests.engine.leaning import lean, second_best
from tests.engine.test_tensor_parallel import on_ranks


@dataclass
class Run:
    """Results of a row."""

    plain: list[Answer]
    ours: list[Answer]
    figures: dict[str, float]
    """Growth of vLLM's counters."""
    batches: list[list[Any]] = field(default_factory=list)
    """Trees of each step; none where the engine is in another process, as below."""
    steps: dict[str, list[int]] = field(default_factory=dict)
    """Request -> the tokens that the worker has handed to the scheduler in each step, in the order of their first."""

    def both(self) -> Iterator[tuple[Answer, Answer]]:
        """Pairs of answers with trees and without, of the requests that have one right answer and were not aborted."""
        for ours, theirs in zip(self.ours, self.plain, strict=True):
            assert ours.left == theirs.left
            if ours.fixed and not ours.left:
                yield ours, theirs

    @property
    def tokens(self) -> int:
        return sum(len(one.token_ids) for answer in self.ours for one in answer.completions)


Proof = Callable[[Run], None]


@dataclass(frozen=True)
class Report:
    name: str
    source: str
    """Public threads."""
    spec: dict[str, Any]
    """speculative_config; a function in it makes a file or a checkpoint in a folder."""
    requests: Conversation
    proofs: tuple[Proof, ...] = ()
    """Conditions: that the report is reproduced, and more."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine, with trees and without."""
    plain: dict[str, Any] | None = None
    """Arguments without trees, where vLLM cannot take the same."""
    judge: Proof | None = None
    """Condition in place of identity."""
    times: int = 1
    """Number of times that the requests are served, one after the other; the prefix cache is kept."""
    leans: bool = False
    """True if a head of random weights shall agree with the known outputs of the target."""
    process: bool = False
    """True for `AsyncLLM`, with its engine in a process of its own."""
    ranks: int = 1
    """Number of ranks of tensor parallelism, each in a process of its own."""
    environment: dict[str, str] = field(default_factory=dict)
    slow: bool = False
    marks: tuple[Any, ...] = ()

    @property
    def without(self) -> dict[str, Any]:
        return self.engine if self.plain is None else self.plain

    @property
    def key(self) -> str:
        """Key of the engine, which rows of one key share."""
        return f"{self.engine} {self.spec} {self.leans} {self.process}"


def grouped(reports: Sequence[Report]) -> list[Any]:
    """Parameters of a test: rows that share an engine side by side, else in the order of the table."""
    names = [one.name for one in reports]
    assert len({*names}) == len(names), "two rows have one name"
    places = [[*dict.fromkeys(found)] for found in ([str(one.engine) for one in reports], [one.key for one in reports])]
    ordered = sorted(reports, key=lambda one: (places[0].index(str(one.engine)), places[1].index(one.key)))
    return [pytest.param(one, id=one.name, marks=[*one.marks, *[pytest.mark.slow] * one.slow]) for one in ordered]


class Trials:
    """One engine at a time, and the answers of engines without speculation to `reports`."""

    def __init__(self, engines: Engines, folder: Path, reports: Sequence[Report]):
        self.engines, self.folder, self.reports = engines, folder, reports
        self.answers, self.made, self.key = dict[str, list[Answer]](), dict[str, str](), ""
        self.server: Server | None = None

    def run(self, report: Report, patch: pytest.MonkeyPatch) -> Run:
        for name, value in report.environment.items():
            patch.setenv(name, value)
        if report.name not in self.answers:
            self._ask_without(report)
        if report.ranks > 1:
            return self._on_ranks(report)
        if self.key != report.key:
            self._start(report)
        run = Run(self.answers[report.name], [], {})
        if self.server is None:
            run.batches = TreeSpy(self.engines.llm, patch).batches
            _count(self.engines.llm, run.steps, patch)
        before = _figures()
        for time in range(report.times):
            if self.server is None:
                run.ours = serve(self.engines.llm, report.requests, fresh=not time)
            else:
                run.ours = self.server.serve(report.requests, fresh=not time)
        run.figures = {name: value - before.get(name, 0.0) for name, value in _figures().items()}
        return run

    def _on_ranks(self, report: Report) -> Run:
        """Serve the requests in processes of their own, which report greedy tokens and texts alone."""
        self.shutdown()
        plain, ours = self.answers[report.name], list[Answer]()
        requests = [one for one in report.requests if isinstance(one, Request)]
        prompts = [{"prompt_token_ids": one.prompt} for one in plain]
        tokens, texts, (accepted, *_), _ = on_ranks(
            self.folder,
            TARGET,
            report.spec,
            {"tensor_parallel_size": report.ranks, **report.engine},
            prompts,
            [one.params for one in requests],
            [],
        )
        for answer, ids, text in zip(plain, tokens, texts, strict=True):
            end = SimpleNamespace(token_ids=ids, text=text, finish_reason="length", stop_reason=None, logprobs=None)
            ours.append(answer._replace(completions=[end]))
        return Run(plain, ours, {"spec_decode_num_accepted_tokens": accepted})

    def _ask_without(self, report: Report) -> None:
        """Ask all requests of this engine without speculation."""
        self.shutdown()
        llm = self.engines.start(**self._made(report.without))
        for one in self.reports:
            if one.without == report.without:
                for time in range(one.times):
                    self.answers[one.name] = serve(llm, one.requests, fresh=not time, compared=True)

    def _start(self, report: Report) -> None:
        self.shutdown()
        spec, arguments = self._made(report.spec), self._made(report.engine)
        self.key = report.key
        if report.process:
            self.server = Server(spec, arguments)
            return
        llm = self.engines.start(spec, **arguments)
        if report.leans:
            alike = [answer for one in self.reports if one.key == report.key for answer in self.answers[one.name]]
            known = [(one.prompt, one.completions[0].token_ids) for one in alike]
            lean(runner_of(llm), second_best(known, llm.model_config.get_vocab_size()))

    def _made(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._made(one) for name, one in value.items()}
        if not callable(value):
            return value
        if repr(value) not in self.made:
            self.made[repr(value)] = value(self.folder / str(len(self.made)))
        return self.made[repr(value)]

    def shutdown(self) -> None:
        self.key = ""
        if self.server is not None:
            self.server.shutdown()
            self.server = None
        self.engines.shutdown()


def _figures() -> dict[str, float]:
    found = dict[str, float]()
    for one in get_metrics_snapshot():
        name = one.name.removeprefix("vllm:")
        found[name] = found.get(name, 0.0) + getattr(one, "value", 0.0)
    return found


def _count(llm: Any, steps: dict[str, list[int]], patch: pytest.MonkeyPatch) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.update_from_output

    def update(scheduled: Any, output: Any) -> Any:
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if len(tokens):
                steps.setdefault(name, []).append(len(tokens))
        return original(scheduled, output)

    patch.setattr(scheduler, "update_from_output", update)
