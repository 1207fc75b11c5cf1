"""What an engine generated under one load, step by step, and what it cost."""

import statistics
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_adaptive_tree.report.tokens import Span

Steps = list[list[int]]  # of one request: per step, the token ids that arrived

COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")  # vLLM's own, behind "vllm:spec_decode_num_"


class Load(NamedTuple):
    name: str
    batch: int  # requests at a time
    rounds: int  # all prompts again, for a steadier time


class Turn(NamedTuple):
    """A batch of greedy requests, from the first step to the last."""

    requests: list[Steps]
    seconds: float
    cpu_seconds: float  # of the engine's process
    counters: dict[str, int]  # of `COUNTERS`


class Difference(NamedTuple):
    """Where a text leaves another one of the same prompt."""

    request: int
    margin: float  # how far below the best logit the lower one of the two tokens is
    near_tie: bool


class About(NamedTuple):
    """What an engine says of itself."""

    vllm: str  # version
    dtype: str
    threads: int
    in_process: bool  # in the process that is timed


@dataclass(frozen=True, slots=True)
class Generation:
    """All prompts under one load."""

    rounds: list[list[Turn]]  # [round][batch]
    texts: list[str]  # [request]
    spans: list[list["Span"]]  # [request], without the last step, which `max_tokens` may have cut
    about: About
    differences: list[Difference]  # from the reference's first round, one per request that differs

    @property
    def requests(self) -> list[list[Steps]]:  # [round][request]
        return [[steps for turn in turns for steps in turn.requests] for turns in self.rounds]

    @property
    def tokens(self) -> list[list[list[int]]]:  # [round][request][token]
        return [[flat(steps) for steps in requests] for requests in self.requests]

    @property
    def seconds(self) -> list[float]:  # [round]
        return [sum(turn.seconds for turn in turns) for turns in self.rounds]

    @property
    def cpu_seconds(self) -> list[float]:  # [round]
        return [sum(turn.cpu_seconds for turn in turns) for turns in self.rounds]

    @property
    def counters(self) -> dict[str, int]:  # over all rounds
        turns = [turn for turns in self.rounds for turn in turns]
        return {name: sum(turn.counters[name] for turn in turns) for name in COUNTERS}

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens[0])) / statistics.median(self.seconds)

    @property
    def core_share(self) -> float:
        """Of its threads' time, how much the engine computed. Well below 1 where it had to wait for a core: then
        `seconds` measure the other programs."""
        return sum(self.cpu_seconds) / sum(self.seconds) / self.about.threads

    @property
    def decode_steps(self) -> int:  # a request's first step is its prefill
        return sum(len(steps) - 1 for requests in self.requests for steps in requests)

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.counters["accepted_tokens"] / max(1, self.decode_steps)

    @property
    def nodes_per_step(self) -> float:
        return self.counters["draft_tokens"] / max(1, self.decode_steps)

    def check_counters(self, nodes: int) -> None:
        """vLLM's counters against the tokens that arrived. A request's last step may have been cut at `max_tokens`,
        after the accepted tokens were counted.

        Raises RuntimeError where they contradict each other.
        """
        requests = [steps for round_ in self.requests for steps in round_]
        accepted = sum(len(step) - 1 for steps in requests for step in steps)
        cut = sum(nodes + 1 - len(steps[-1]) for steps in requests)
        drafts, counted = self.counters["drafts"], self.counters["accepted_tokens"]
        if drafts > self.decode_steps or not accepted <= counted <= accepted + cut:
            raise RuntimeError(
                f"vLLM counted {drafts} drafts and {counted} accepted tokens, but {self.decode_steps} decode steps "
                f"with {accepted} tokens beyond the first arrived (at most {cut} may have been cut)"
            )


def flat(steps: Steps) -> list[int]:
    return list(chain.from_iterable(steps))
