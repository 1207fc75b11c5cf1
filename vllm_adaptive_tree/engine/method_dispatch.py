"""Dispatch of the method that a user asks for: one of ours, one of vLLM's, or an unknown one."""

import difflib
import json
from collections.abc import Callable
from typing import Any, get_args

from pydantic import ValidationError

from vllm_adaptive_tree.config import is_tree_method
from vllm_adaptive_tree.engine.patches import install, missing_symbols_named
from vllm_adaptive_tree.proposers import PROPOSERS


def create_engine_config(args: Any, original: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """The wrapped `EngineArgs.create_engine_config`; `original` is vLLM's, `args` an EngineArgs.

    Raises:
        ValueError: for a tree method that this release cannot serve as asked, or that is given as a string, and for an
            unknown method.
        RuntimeError: for a tree method in a vLLM that this release does not support.
    """
    config: Any = getattr(args, "speculative_config", None)
    if is_tree_method(config) and config["method"] not in _methods_of_vllm():
        install()
        with missing_symbols_named():
            from vllm_adaptive_tree.engine.translate import create_tree_engine_config
        return create_tree_engine_config(args, original, *rest, **kwargs)
    if isinstance(config, str) and is_tree_method(_parsed(config)):
        raise ValueError(
            f"speculative_config must be a mapping, and is a text, {config!r}; give json.loads(...) of it in its place"
        )
    try:
        return original(args, *rest, **kwargs)
    except ValidationError as error:
        method = _refused_method(error)
        if method is None:
            raise
        raise ValueError(_unknown(method)) from error


def _parsed(text: str) -> Any:
    """Parse `text`: vLLM's command line reads JSON, its `EngineArgs` do not."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refused_method(error: ValidationError) -> str | None:
    """Name of the method if `SpeculativeConfig` is invalid because vLLM does not have it, else None."""
    for detail in error.errors() if error.title == "SpeculativeConfig" else ():
        if detail["loc"] == ("method",) and isinstance(detail["input"], str):
            return detail["input"]
    return None


def _unknown(method: str) -> str:
    ours = tuple(PROPOSERS)
    if method in ours:
        return f"{method!r} is a tree method: give it as speculative_config={{'method': {method!r}, ...}}"
    closest = difflib.get_close_matches(method, (*ours, *_methods_of_vllm()), n=1)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    return (
        f"speculative_config['method']: neither vLLM nor vllm-adaptive-tree knows {method!r}; {hint}"
        f"Tree methods: {', '.join(ours)}"
    )


def _methods_of_vllm() -> tuple[str, ...]:
    try:
        from vllm.config.speculative import SpeculativeMethod
    except ImportError:  # outside the supported window it may have moved
        return ()
    return get_args(SpeculativeMethod)
