"""Which method a user asks for: one of ours, one of vLLM's, or an unknown one."""

import difflib
from collections.abc import Callable
from typing import Any, get_args

from pydantic import ValidationError

from vllm_adaptive_tree.config import is_tree_method
from vllm_adaptive_tree.engine.patches import install, missing_symbols_named
from vllm_adaptive_tree.proposers import PROPOSERS


def create_engine_config(args: Any, original: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """The wrapped `EngineArgs.create_engine_config`; `original` is vLLM's, `args` an EngineArgs.

    Raises:
        ValueError: for a tree method that this release cannot serve as asked, and for an unknown method.
        RuntimeError: for a tree method in a vLLM that this release does not support.
    """
    asked: Any = getattr(args, "speculative_config", None)
    if is_tree_method(asked) and asked["method"] not in _methods_of_vllm():
        install()
        with missing_symbols_named():
            from vllm_adaptive_tree.engine.translate import create_tree_engine_config
        return create_tree_engine_config(args, original, *rest, **kwargs)
    try:
        return original(args, *rest, **kwargs)
    except ValidationError as error:
        method = _refused_method(error)
        if method is None:
            raise
        raise ValueError(_unknown(method)) from error


def _refused_method(error: ValidationError) -> str | None:
    """The method, if `SpeculativeConfig` is invalid because vLLM does not have that method."""
    for one in error.errors() if error.title == "SpeculativeConfig" else ():
        if one["loc"] == ("method",) and isinstance(one["input"], str):
            return one["input"]
    return None


def _unknown(method: str) -> str:
    ours = PROPOSERS.names()
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
