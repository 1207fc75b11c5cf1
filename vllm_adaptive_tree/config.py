"""What a user may write into `speculative_config`, validated once, with the remedy in the error."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

METHODS = ("opt_tree",)
PLANNED_METHODS = ("dyspec", "c2t", "eagle2", "static_tree", "sequoia", "mcsd")
RULES = ("auto", "target_only")
PLANNED_RULES = ("rrs", "rrsw", "spechub", "greedy_multi_draft", "k_seq", "traversal")
VLLM_RULES = ("standard", "synthetic", "block")

VLLM_KEYS = (
    "revision",
    "code_revision",
    "quantization",
    "draft_tensor_parallel_size",
    "max_model_len",
    "enforce_eager",
    "kv_cache_dtype",
    "draft_load_config",
    "moe_backend",
)
"""Keys of vLLM's own speculative_config that keep their meaning beside a tree method."""

OUR_KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method", "tree")
PLANNED_TREE_KEYS = ("allow_lossy", "budget", "cost_profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptTreeOptions:
    """`tree` options of `method: "opt_tree"`."""

    draft: Literal["model"] | None = None
    """Kind of the draft; None: told apart by the checkpoint's architectures."""
    max_depth: int = 10
    threshold: float | Literal["auto"] = 0.5
    """Stop when a level adds no more than this to E(A), in tokens; "auto": draft level over target forward."""
    draft_temperature: float | Literal["auto"] = "auto"
    """Temperature of the law that shapes the tree; "auto": 0.6 for greedy requests, else the request's own."""

    def __post_init__(self) -> None:
        if self.draft in ("eagle", "eagle3", "mtp"):
            raise ValueError(
                f"speculative_config['tree']['draft']: {self.draft!r} heads are not supported yet; "
                "use an independent draft model and 'model'"
            )
        if self.draft not in (None, "model"):
            raise ValueError(f"speculative_config['tree']['draft'] must be 'model', got {self.draft!r}")
        if not _is_int(self.max_depth) or self.max_depth < 1:
            raise ValueError(
                f"speculative_config['tree']['max_depth'] must be a whole number of at least 1, got {self.max_depth!r}"
            )
        if self.threshold != "auto" and not (_is_number(self.threshold) and self.threshold >= 0):
            raise ValueError(
                "speculative_config['tree']['threshold'] must be a number of at least 0 (tokens gained per level) "
                f"or 'auto', got {self.threshold!r}"
            )
        if self.draft_temperature != "auto" and not (_is_number(self.draft_temperature) and self.draft_temperature > 0):
            raise ValueError(
                "speculative_config['tree']['draft_temperature'] must be a number above 0 or 'auto', "
                f"got {self.draft_temperature!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Everything this project needs to know of one `speculative_config`."""

    method: str
    num_speculative_tokens: int
    rejection_sample_method: str = "auto"
    tree: OptTreeOptions = field(default_factory=OptTreeOptions)

    def __post_init__(self) -> None:
        if not _is_int(self.num_speculative_tokens) or self.num_speculative_tokens < 1:
            raise ValueError(
                "speculative_config['num_speculative_tokens'] is the node budget per request and step: give a whole "
                f"number of at least 1 (25 is a good start), got {self.num_speculative_tokens!r}"
            )
        rule = self.rejection_sample_method
        if rule in VLLM_RULES:
            raise ValueError(
                f"speculative_config['rejection_sample_method']: {rule!r} is vLLM's rule for chains and cannot verify "
                f"a tree; remove the key or use one of {_names(RULES)}"
            )
        if rule in PLANNED_RULES:
            raise ValueError(
                f"speculative_config['rejection_sample_method']: {rule!r} is not in this release; "
                f"use one of {_names(RULES)}"
            )
        if rule not in RULES:
            raise ValueError(
                f"speculative_config['rejection_sample_method'] must be one of {_names(RULES)}, got {rule!r}"
            )

    @classmethod
    def parse(cls, speculative_config: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split a speculative_config into our options and the keys that go on to vLLM ("model" among them).

        Raises:
            ValueError: for an unknown, missing, refused or ill-valued key; the message names it and the remedy.
        """
        given = {key.replace("-", "_"): value for key, value in speculative_config.items()}
        method = given["method"]
        if method in PLANNED_METHODS:
            raise ValueError(
                f"speculative_config['method']: {method!r} is not in this release; use one of {_names(METHODS)}"
            )
        assert method in METHODS
        for key in given:
            if key not in OUR_KEYS + VLLM_KEYS:
                raise ValueError(
                    f"speculative_config[{key!r}] has no meaning beside method {method!r}; remove it. "
                    f"Known keys: {_names(OUR_KEYS + VLLM_KEYS)}"
                )
        for key, what in (("model", "the draft model"), ("num_speculative_tokens", "the node budget, 25 for example")):
            if given.get(key) is None:
                raise ValueError(f"speculative_config[{key!r}] is missing: method {method!r} needs {what}")
        if not isinstance(given["model"], str) or not given["model"]:
            raise ValueError(f"speculative_config['model'] must name the draft model, got {given['model']!r}")
        options = cls(
            method=method,
            num_speculative_tokens=given["num_speculative_tokens"],
            rejection_sample_method=given.get("rejection_sample_method", "auto"),
            tree=_tree_options(given.get("tree", {}), method),
        )
        return options, {key: given[key] for key in ("model", *VLLM_KEYS) if key in given}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "tree": OptTreeOptions(**data["tree"])})


def is_tree_method(speculative_config: Any) -> bool:
    """Whether this project is asked for; anything else is vLLM's own business."""
    return isinstance(speculative_config, Mapping) and speculative_config.get("method") in METHODS + PLANNED_METHODS


def _tree_options(tree: Any, method: str) -> OptTreeOptions:
    if not isinstance(tree, Mapping):
        raise ValueError(f"speculative_config['tree'] must be a mapping of options, got {tree!r}")
    given = {key.replace("-", "_"): value for key, value in tree.items()}
    known = tuple(OptTreeOptions.__dataclass_fields__)
    for key in given:
        if key in PLANNED_TREE_KEYS:
            raise ValueError(f"speculative_config['tree'][{key!r}] is not in this release; remove it")
        if key not in known:
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is not an option of {method!r}; known options: {_names(known)}"
            )
    return OptTreeOptions(**given)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
