"""KV connectors that may stand beside trees: those of whole blocks, whose tokens are known when a step is scheduled."""

from typing import Any

from vllm_adaptive_tree.config import TreeOptions

BY_LAYER = "ExampleConnector", "LMCacheConnectorV1", "MoRIIOConnector"
"""KV connectors that take K/V inside of the attention of each layer, or may, or know the target's layers alone."""


def check_connector(config: Any, options: TreeOptions) -> None:
    """Refuse a connector of a built VllmConfig that would take what is not there, or not accepted yet."""
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return
    if options.text is None and (connector := _connector_by_layer(transfer)) is not None:
        raise ValueError(
            f"kv_transfer_config: {connector} takes K/V layer by layer, which is not supported with a tree method and "
            "a draft with layers: it runs none while it rests. Use a connector of whole blocks (kv_offloading_size, "
            "'OffloadingConnector', 'NixlConnector'), or 'ngram' or 'suffix' as speculative_config['model']"
        )
    if config.scheduler_config.async_scheduling and _sends_answers(transfer):
        raise ValueError(
            "kv_connector_extra_config['bidirectional_kv_xfer'] is not supported with a tree method and asynchronous "
            "scheduling: vLLM sends the nodes of the step in flight as if they were accepted; set async_scheduling to "
            "False (--no-async-scheduling)"
        )


def _connector_by_layer(transfer: Any) -> str | None:
    """Name of a connector that takes K/V layer by layer; `transfer`: vLLM's KVTransferConfig."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if (name := next(filter(transfer.has_connector, BY_LAYER), None)) is not None:
        return name
    try:
        kind = KVConnectorFactory.get_connector_class(transfer)
    except ImportError:  # vLLM says so when it makes the connector
        return None
    return kind.__name__ if kind.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config) else None


def _sends_answers(transfer: Any) -> bool:
    """Return whether a decode instance gives its K/V back to a prefill instance."""
    extra = transfer.kv_connector_extra_config
    children = (child.get("kv_connector_extra_config", {}) for child in extra.get("connectors", ()))
    return any(given.get("bidirectional_kv_xfer") for given in (extra, *children))
