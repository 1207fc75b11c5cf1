"""Is A at least B? A line with its verdict, and the sentence, table or figure of the paper that it judges."""

from typing import Literal, NamedTuple

import numpy as np

from benchmarks.papers.bootstrap import Estimate

Verdict = Literal["holds", "within noise", "does not hold", "not reached"]


class Claim(NamedTuple):
    text: str
    verdict: Verdict
    figures: str
    source: str
    """The sentence, table or figure that says so; "": no paper does, the line is ours."""
    theirs: str = ""
    """The paper's figures."""
    reason: str = ""
    headline: bool = False


class Source(NamedTuple):
    """Statement of a paper: its place and its figures."""

    where: str
    theirs: str = ""
    headline: bool = False

    def judge(self, text: str, gain: Estimate, reason: str = "", *, least: float = 0.0, shown: str = "") -> Claim:
        """`gain` should be above `least` (a share); an interval around it is noise, and says what it resolves."""
        verdict: Verdict = "holds" if gain.low > least else "does not hold" if gain.high < least else "within noise"
        if gain.mean == -np.inf:
            verdict = "not reached"
        figures = shown or gain.signed()
        if least:
            figures += f"; limit {least:+.0%}"
        if verdict == "within noise" and np.isfinite(gain.resolution):
            unit = f"{gain.resolution:.0%}" if "%" in figures else f"{gain.resolution:.3f}"
            figures += f"; resolves {unit}"
        return Claim(text, verdict, figures, self.where, self.theirs, reason, self.headline)

    def judge_equal(self, text: str, change: Estimate, margin: float, reason: str = "") -> Claim:
        """`change` should be 0: its whole interval within the margin."""
        near, far = max(-change.low, change.high) < margin, max(change.low, -change.high) > margin
        verdict: Verdict = "holds" if near else "does not hold" if far else "within noise"
        figures = f"{change.signed()}; margin {margin:g}"
        return Claim(text, verdict, figures, self.where, self.theirs, reason, self.headline)

    def judge_fact(
        self, text: str, holds: bool, figures: str, reason: str = "", *, otherwise: Verdict = "does not hold"
    ) -> Claim:
        verdict: Verdict = "holds" if holds else otherwise
        return Claim(text, verdict, figures, self.where, self.theirs, reason, self.headline)


OURS = Source("")
