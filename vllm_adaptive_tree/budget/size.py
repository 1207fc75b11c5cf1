"""State per batch size: measured times, and when to skip drafting."""

from collections import deque
from typing import Any

from vllm_adaptive_tree.budget.levels import Levels
from vllm_adaptive_tree.budget.reading import member, number, numbers, short

REST, LONGEST_REST = 64, 2048
"""Steps without drafts, which are tokens of every request: after the first loss, and after the last of many."""
PROBE, FIRST_PROBE, NEXT_PROBE = 512, 2, 64
"""Drafting steps between two looks at what a step without drafts takes; before the first look, and before the next as
long as none has shown it."""
SEEN = 5
"""Steps without drafts that are remembered."""


class Size:
    """What is known of batches of one size (by powers of two) and mix; it says nothing of the others."""

    def __init__(self) -> None:
        self.drafting: float | None = None
        """Seconds of drafting a step's trees, averaged over past steps."""
        self.besides = 0.0
        """Seconds of a step for what is not drafted in every step: prompts and gaps that the draft reads. Averaged."""
        self.advantage = 0.0
        """Log of tokens per second with drafts over without, averaged since the last rest."""
        self.judged = 0
        """Steps in that average."""
        self.rate = 0.0
        """Tokens per second with drafts."""
        self.level: float | None = None
        """Seconds of a draft level, from live steps."""
        self.levels = Levels()
        self.least: float | None = None
        """Log of the least value that a step verifies, averaged."""
        self.plain: deque[tuple[int, float]] = deque(maxlen=SEEN)
        """Live steps without drafts: requests, and seconds besides reading contexts."""
        self.rest = 0
        """Steps without drafts that are left."""
        self.last_rest = REST // 2
        self.trying = False
        """Whether it has drafted since the last rest."""
        self.drafted, self.next_probe = 0, FIRST_PROBE
        """Drafting steps since the last probe, and those between it and the next."""

    def begin_rest(self) -> None:
        """Twice as long as the last one."""
        self.rest = self.last_rest = min(LONGEST_REST, 2 * self.last_rest)
        self.judged, self.trying = 0, False

    def probe(self, steps: int) -> None:
        """Leave out the drafts of `steps` steps now and then, so that what drafting is judged by is a live step."""
        self.drafted += 1
        if self.drafted > self.next_probe:
            self.rest, self.drafted = steps, 0
            self.next_probe = PROBE if self.plain else NEXT_PROBE

    def to_json(self) -> dict[str, Any]:
        known = {name: short([value])[0] for name in OPTIONAL if (value := getattr(self, name)) is not None}
        plain = [[requests, *short([seconds])] for requests, seconds in self.plain]
        besides, rate = short([self.besides, self.rate])
        return {
            **known,
            "besides": besides,
            "rate": rate,
            "last_rest": self.last_rest,
            "plain": plain,
            "levels": self.levels.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> "Size":
        """Of an earlier process; one that lost there begins with a rest. Raises ValueError where `data` is not what
        `to_json` gives."""
        size = cls()
        for name, (least, most) in OPTIONAL.items():
            if data.get(name) is not None:
                setattr(size, name, number(data[name], least, most))
        size.besides, size.rate = number(member(data, "besides")), number(member(data, "rate"))
        size.last_rest = int(number(member(data, "last_rest"), REST // 2, LONGEST_REST))
        size.rest = REST if size.last_rest >= REST else 0
        plain = [numbers(one, 2) for one in member(data, "plain")[-SEEN:]]
        size.plain.extend((max(1, int(requests)), seconds) for requests, seconds in plain)
        size.next_probe = PROBE if size.plain else FIRST_PROBE
        size.levels.restore(member(data, "levels"))
        return size


OPTIONAL = {"drafting": (0.0, 1e6), "level": (0.0, 1e6), "least": (-1e3, 0.0)}
"""What may be unknown, and its bounds."""
