"""Which vLLM releases this one supports: the one table that the gate, the extras, the tests and the docs read."""

SUPPORTED = ("0.32",)
"""Every patch release of these minors."""


def is_supported(version: str) -> bool:
    """Whether vLLM `version` ("0.32.0", "0.32.1+cpu") lies in the supported window."""
    return ".".join(version.split("+")[0].split(".")[:2]) in SUPPORTED


def window() -> str:
    """For messages: "0.32.*"."""
    return ", ".join(f"{minor}.*" for minor in SUPPORTED)
