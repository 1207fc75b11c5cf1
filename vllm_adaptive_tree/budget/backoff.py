"""When to try an alternative that no step measures otherwise."""

RETRY_AFTER, PROBE_EVERY, MAX_BACKOFF = 64, 512, 2048
"""Steps before an alternative is tried, doubled each time up to the last number: drafts in a batch that rests (first
number); a step without drafts in one that drafts (second), which costs tokens."""


class Backoff:
    """Counts steps, and tells when to try an alternative, with doubling intervals."""

    def __init__(self, first: int, then: int):
        self.left, self.next = first, then

    def due(self, times: int = 1) -> bool:
        """Count a step and return whether to try now, so many `times` in a row."""
        self.left -= 1
        if self.left <= -times:
            self.left, self.next = self.next, min(2 * self.next, MAX_BACKOFF)
            return True
        return self.left < 0
