"""The only function of vLLM that is wrapped in every process, with or without a tree method."""

import sys
from functools import wraps
from typing import Any

from vllm_adaptive_tree.engine.names import MARK


def patch_create_engine_config() -> None:
    """Wrap `EngineArgs.create_engine_config`: a tree method becomes a configuration that stock vLLM accepts.

    Later hooks are too late: `worker_cls` is read before `create_speculative_config` runs, and pydantic rejects our
    method names and keys.
    """
    from vllm.engine.arg_utils import EngineArgs

    _wrap_create_engine_config(EngineArgs)


def refuse_tree_methods() -> None:
    """Wrap it outside the supported window, to refuse tree methods with the version to install; imports nothing, and
    does nothing if `EngineArgs` has changed."""
    args = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if isinstance(args, type) and callable(vars(args).get("create_engine_config")):
        _wrap_create_engine_config(args)


def _wrap_create_engine_config(engine_args: Any) -> None:
    original = engine_args.create_engine_config
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_adaptive_tree.engine import method_dispatch

        return method_dispatch.create_engine_config(self, original, *args, **kwargs)

    setattr(create_engine_config, MARK, True)
    engine_args.create_engine_config = create_engine_config
