"""The mark on the SpeculativeConfig of a tree method, which works in every process that it reaches."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine import installation, patches
from vllm_adaptive_tree.engine.common.request_flags import check_request
from vllm_adaptive_tree.methods import Pair, resolve


@dataclass(frozen=True)
class Mark:
    """Mark that acts when it is copied or unpickled: it compares the installed packages with those where it was
    pickled, and installs our patches. A front end may be given a finished configuration and never load a plugin."""

    options: TreeOptions
    varying: str | None
    """Why trees follow from more than the text of their request, if so."""

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (installation.here(), self.options.to_json(), self.varying)

    @cached_property
    def pair(self) -> Pair:
        return resolve(self.options)

    def check(self, sampling: Any) -> None:
        """Check what a request asks of its trees in its SamplingParams.

        Raises:
            VLLMValidationError: names the key; over HTTP a 400.
        """
        from vllm.exceptions import VLLMValidationError

        try:
            check_request(sampling, self.pair, self.options, self.varying)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def arrive(wanted: Mapping[str, str], options: Mapping[str, Any], varying: str | None) -> Mark:
    """The mark in another process. `wanted`: the installation that it comes from.

    Raises:
        RuntimeError: other versions are installed here; names the node and the remedy.
    """
    installation.check(wanted)
    patches.install()
    return Mark(TreeOptions.from_json(options), varying)
