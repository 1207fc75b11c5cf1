"""Target's embedding in a head that has none of its own."""

from typing import Any

from vllm.lora.layers.base import BaseLayerWithLoRA


def drop_adapters(backbone: Any) -> None:
    """Embed without LoRA, as on Model Runner V2.

    vLLM shares the layer as it is, with adapters, which are set for the rows of the target's step and not for the
    head's. `backbone`: the model inside the head's.
    """
    shared = getattr(backbone, "embed_tokens", None)
    if isinstance(shared, BaseLayerWithLoRA):
        backbone.embed_tokens = shared.base_layer


def embedding_of(target: Any) -> Any:
    """Embedding of the target, without LoRA."""
    text = getattr(target, "language_model", target)  # of one that may read images
    inner = getattr(text, "model", text)
    embedding = getattr(inner, "embed_tokens", None) or getattr(inner, "embedding", None)
    return embedding.base_layer if isinstance(embedding, BaseLayerWithLoRA) else embedding
