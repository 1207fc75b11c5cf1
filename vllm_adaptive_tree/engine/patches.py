"""Everything this project changes in vLLM by replacing a function. The ledger with reasons: `patches/README.md`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

MARK = "_adaptive_tree"


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


@contextmanager
def swapped(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` inside the block: where vLLM builds a class inline, it builds ours."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
