"""A Llama from its config.json: what one of several tensor-parallel ranks holds of it."""

import json
from dataclasses import dataclass
from pathlib import Path

VOCABULARY_STEP = 64
"""vLLM pads a vocabulary to a multiple of it."""
SCALE = 4  # bytes; FP8 weights have one for every row of their output


@dataclass(frozen=True, slots=True)
class Model:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the embedding is the output head, too."""

    @classmethod
    def read(cls, folder: str | Path) -> "Model":
        """Raises ValueError for a folder that holds no Llama."""
        file = Path(folder) / "config.json"
        try:
            config = json.loads(file.read_text())
            if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
                raise ValueError("not a Llama without biases")
            return cls(
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                heads=config["num_attention_heads"],
                kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                intermediate=config["intermediate_size"],
                vocabulary=config["vocab_size"],
                tied=config.get("tie_word_embeddings", False),
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"cannot read {file} ({type(error).__name__}: {error}); give a folder with the config.json of a Llama"
            ) from error


@dataclass(frozen=True, slots=True)
class Shard:
    """What one of `ranks` GPUs holds of a model, as vLLM cuts it; activations and K/V are 16 bits wide."""

    model: Model
    ranks: int
    fp8: bool = False
    """Linear layers in FP8, a scale per output row; embedding, head and norms stay in 16 bits."""

    def __post_init__(self) -> None:
        """Raises ValueError where vLLM could not cut the model."""
        model, ranks = self.model, self.ranks
        for size, what in (
            (model.heads, "attention heads"),
            (model.intermediate, "MLP units"),
            (self._padded_vocabulary, "rows of the embedding"),
            (max(model.kv_heads, ranks), "K/V heads"),
        ):
            if ranks < 1 or size % ranks:
                raise ValueError(f"{size} {what} cannot be cut for {ranks} ranks; give another tensor-parallel size")
        if ranks > model.kv_heads and ranks % model.kv_heads:
            raise ValueError(f"{model.kv_heads} K/V heads cannot be copied to {ranks} ranks evenly; give another size")

    @property
    def heads(self) -> int:
        return self.model.heads // self.ranks

    @property
    def kv_heads(self) -> int:
        """At least one: with more ranks than K/V heads, several hold the same."""
        return max(1, self.model.kv_heads // self.ranks)

    @property
    def linear(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's weights: Q, K and V; their way back; gate and up; down."""
        model, units = self.model, self.model.intermediate // self.ranks
        attention, keys = self.heads * model.head_size, self.kv_heads * model.head_size
        return (
            (attention + 2 * keys, model.hidden),
            (model.hidden, attention),
            (2 * units, model.hidden),
            (model.hidden, units),
        )

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output head."""
        return self._padded_vocabulary // self.ranks * self.model.hidden

    @property
    def parameters(self) -> int:
        norms = (2 * self.model.layers + 1) * self.model.hidden
        return self._linear_parameters + norms + self.embedding * (1 if self.model.tied else 2)

    @property
    def weights(self) -> int:
        """Bytes."""
        if not self.fp8:
            return 2 * self.parameters
        scales = self.model.layers * sum(outputs for outputs, _ in self.linear)
        return 2 * self.parameters - self._linear_parameters + SCALE * scales

    @property
    def read(self) -> tuple[int, int]:
        """Parameters that a forward reads, and their bytes: all but an embedding that is not the head as well."""
        unread = 0 if self.model.tied else self.embedding
        return self.parameters - unread, self.weights - 2 * unread

    @property
    def kv(self) -> int:
        """Bytes of K/V of a token."""
        return self.model.layers * 2 * self.kv_heads * self.model.head_size * 2

    @property
    def _linear_parameters(self) -> int:
        return self.model.layers * sum(outputs * inputs for outputs, inputs in self.linear)

    @property
    def _padded_vocabulary(self) -> int:
        return -(-self.model.vocabulary // VOCABULARY_STEP) * VOCABULARY_STEP
