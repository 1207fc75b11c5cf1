"""Everything this project changes in vLLM by replacing a function. The ledger with reasons: `patches/README.md`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

MARK = "_adaptive_tree"
"""On a wrapped function: it is ours. On a SpeculativeConfig: it came from a tree method (it survives pickling)."""


def patch_create_engine_config() -> None:
    """Wrap `EngineArgs.create_engine_config`: a tree method becomes a configuration that stock vLLM accepts.

    Later hooks are too late: `worker_cls` is read before `create_speculative_config` runs, and pydantic refuses our
    method names and keys.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_adaptive_tree.config import is_tree_method

    original = EngineArgs.create_engine_config
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_tree_method(self.speculative_config):
            return original(self, *args, **kwargs)
        from vllm_adaptive_tree.engine.translate import create_tree_engine_config

        return create_tree_engine_config(self, original, *args, **kwargs)

    setattr(create_engine_config, MARK, True)
    EngineArgs.create_engine_config = create_engine_config


def patch_validate_spec_decode() -> None:
    """Wrap `SamplingParams._validate_spec_decode`: min_p and logit_bias stay refused beside vLLM's own methods, and are
    let through beside ours, whose walk samples every token with vLLM's whole sampler."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        if not getattr(speculative_config, MARK, False):
            original(self, speculative_config)

    setattr(validate, MARK, True)
    SamplingParams._validate_spec_decode = validate


@contextmanager
def swapped(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` inside the block: where vLLM builds a class inline, it builds ours."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
