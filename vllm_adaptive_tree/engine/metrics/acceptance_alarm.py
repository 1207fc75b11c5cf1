"""An alarm for a draft of which the target accepts almost nothing.

The output stays right: a head that reads the wrong layers, or a draft with another tokenizer, shows in lost time only.
The alarm counts steps of requests in which a tree was verified, and those in which a node at depth 1 was accepted.
Trees of look-ups alone do not count: their acceptance depends on the text.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

STEPS, REQUESTS = 512, 4
"""Fewest steps of a window, and fewest requests in it: a single odd text says nothing about a draft."""
LOW, RECOVERED = 0.05, 0.1
"""Shares of accepted steps: below the first a window raises the alarm, from the second on it ends it."""
HOTTEST = 1.0
"""Temperature above which even a good draft is seldom right: the target draws from too many tokens."""


class Window(NamedTuple):
    steps: int
    accepted: int
    """Steps in which a node at depth 1 was accepted."""
    low: bool
    """True if the alarm is raised after this window."""


class AcceptanceAlarm:
    def __init__(self, tell: Callable[[Window], None]):
        """`tell` gets the first window, and each that raises or ends the alarm."""
        self.tell, self.low = tell, False
        self.steps = self.accepted = 0
        self.requests = set[str]()
        self.told = False

    def see(self, request: str, *, accepted: bool) -> None:
        """Count a step of the request that had a tree."""
        self.steps, self.accepted = self.steps + 1, self.accepted + accepted
        self.requests.add(request)
        if self.steps < STEPS or len(self.requests) < REQUESTS:
            return
        before, self.low = self.low, self.accepted < (RECOVERED if self.low else LOW) * self.steps
        window = Window(self.steps, self.accepted, self.low)
        self.steps, self.accepted, self.requests = 0, 0, set()
        if not self.told or self.low != before:
            self.told = True
            self.tell(window)


def is_telling(request: Any) -> bool:
    """Return whether a step of vLLM's `request` says something about the draft: not under constraints that the draft
    may not know (a grammar, allowed or biased tokens), nor at a high temperature."""
    sampling = request.sampling_params
    steered = request.use_structured_output or sampling.allowed_token_ids or sampling.logit_bias
    return not steered and bool(sampling.temperature <= HOTTEST)
