"""Options of one request: `SamplingParams(extra_args={"tree": ...})`, over HTTP `vllm_xargs`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from reprlib import repr as short
from typing import Any, Self

from vllm_adaptive_tree.options import COUNT, is_count

KEY = "tree"
WHERE = "extra_args['tree'] (over HTTP vllm_xargs['tree'])"
EXAMPLE = '{"nodes": 8, "kind": "chosen"}'
CHOSEN, DRAWN = "chosen", "drawn"
REPRODUCIBLE = "reproducible"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    nodes: int | None = None
    """Most nodes of its trees; 0: it has none; None: as many as the engine."""
    kind: str | None = None
    """Children of its nodes, CHOSEN or DRAWN; None: as the method does."""
    seed: str | None = None
    """REPRODUCIBLE: a seed keys the draws of the rule; None: it asks for vLLM's own samples."""

    @classmethod
    def of(cls, sampling: Any) -> "RequestOptions":
        """Options of a request with these SamplingParams.

        Raises:
            ValueError: for an unknown key or a bad value, which it names.
        """
        extra = sampling.extra_args
        return cls.parse(extra[KEY]) if extra and KEY in extra else NOTHING

    @classmethod
    def parse(cls, given: Any) -> Self:
        """`given`: false, a mapping, or either as JSON text: vLLM takes no mapping over HTTP, and makes 0 of false."""
        value = _parsed(given) if isinstance(given, str) else given
        if isinstance(value, int) and value in (0, 1):
            return cls() if value else cls(nodes=0)
        if not isinstance(value, Mapping):
            raise ValueError(f"{WHERE} must be false, or like {EXAMPLE}, got {short(given)}")
        names = [field.name for field in fields(cls)]
        for key in value:
            if key not in names:
                raise ValueError(f"{WHERE}: the key {short(key)} is unknown; known keys: {', '.join(names)}")
        _check("nodes", value, is_count, f"{COUNT} (false in place of the mapping: no trees)")
        _check("kind", value, lambda kind: kind in (CHOSEN, DRAWN), f"{CHOSEN!r} or {DRAWN!r}")
        _check("seed", value, lambda seed: seed == REPRODUCIBLE, repr(REPRODUCIBLE))
        return cls(**value)

    @property
    def names(self) -> list[str]:
        """What the request asks for, as metrics count it."""
        if self.nodes == 0:
            return ["off"]
        given = {"nodes": self.nodes is not None, self.kind: self.kind is not None, self.seed: self.seed is not None}
        return [name for name, asked in given.items() if asked and name]


NOTHING = RequestOptions()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{WHERE} must be false, or like {EXAMPLE}, or JSON text of them, got {short(text)}") from None


def _check(key: str, value: Mapping[str, Any], check: Any, requirement: str) -> None:
    if key in value and not check(value[key]):
        raise ValueError(f"{WHERE}[{key!r}] must be {requirement}, got {short(value[key])}")
