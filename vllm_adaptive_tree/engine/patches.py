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


def patch_connector_metrics() -> None:
    """Wrap the front end's readers of encoder-cache connector statistics, in which the figures of our steps travel."""
    from prometheus_client import Counter, Gauge, Histogram
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorLogging, ECConnectorProm

    from vllm_adaptive_tree.engine.metrics import KEY, TreeProm

    original, original_observe = ECConnectorProm.__init__, ECConnectorLogging.observe
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def init(self: Any, vllm_config: Any, labelnames: list[str], values: dict[int, list[object]]) -> None:
        original(self, vllm_config, labelnames, values)
        if getattr(vllm_config.speculative_config, MARK, False):
            types = {Gauge: self._gauge_cls, Counter: self._counter_cls, Histogram: self._histogram_cls}
            self.prom_metrics = TreeProm(vllm_config, types, labelnames, values)

    @wraps(original_observe)
    def observe(self: Any, transfer_stats_data: dict[str, Any]) -> None:
        if KEY not in transfer_stats_data:  # a connector's own; vLLM fails here without a connector
            original_observe(self, transfer_stats_data)

    setattr(init, MARK, True)
    ECConnectorProm.__init__, ECConnectorLogging.observe = init, observe


@contextmanager
def swapped(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` inside the block: where vLLM builds a class inline, it builds ours."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
