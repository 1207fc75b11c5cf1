"""Supported vLLM releases: the one table that the gate, the extras, the tests and the docs follow."""

SUPPORTED = {"0.32": "0.32.0", "0.33": "0.33.0"}
"""Minor -> the release of it that the tests run with. Every patch release of these minors is accepted."""


def minor(version: str) -> str:
    """Minor version, "0.32", of "0.32.1+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_supported(version: str) -> bool:
    """Return whether vLLM `version` ("0.32.0", "0.32.1+cpu") lies in the supported window."""
    return minor(version) in SUPPORTED


def window() -> str:
    """Supported minors for messages and docs: "0.32 and 0.33"."""
    *others, last = SUPPORTED
    return f"{', '.join(others)} and {last}" if others else last
