"""Verdict of the start-up check of an engine, and its findings."""

from typing import Any, NamedTuple


class Finding(NamedTuple):
    """Result of one check."""

    check: str
    passed: bool
    figures: dict[str, Any]
    """Numbers and short texts, for the log and the report."""

    def __str__(self) -> str:
        figures = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.figures.items()
        )
        return f"{self.check} {'passed' if self.passed else 'FAILED'} ({figures})"


class Verdict(NamedTuple):
    """Results for one engine, on this rank."""

    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [finding.check for finding in self.findings if not finding.passed]

    def __str__(self) -> str:
        return "; ".join(map(str, self.findings))

    def to_json(self) -> list[dict[str, Any]]:
        return [finding._asdict() for finding in self.findings]
