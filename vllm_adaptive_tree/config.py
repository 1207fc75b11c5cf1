"""What a user may write into `speculative_config`, validated once, with the remedy in the error."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from vllm_adaptive_tree import registry
from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.method_options import OPTIONS, MethodOptions, OptTreeOptions

METHODS = tuple(OPTIONS)
VLLM_RULES = ("standard", "synthetic", "block", "fly")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Everything this project needs to know of one `speculative_config`."""

    method: str
    num_speculative_tokens: int
    rejection_sample_method: str = "auto"
    tree: MethodOptions = field(default_factory=OptTreeOptions)
    proposer: str | None = None
    """Path of a registered proposer's class, for a method that is not built in."""
    acceptance: str | None = None
    """Path of a registered rule, for a rule that is not built in: another process knows no names."""
    tree_given: Mapping[str, Any] = field(default_factory=dict)
    """The options of a registered proposer as the user wrote them."""

    def __post_init__(self) -> None:
        nodes, rule = self.num_speculative_tokens, self.rejection_sample_method
        if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
            raise ValueError(
                "speculative_config['num_speculative_tokens'] is the node budget per request and step: give a whole "
                f"number of at least 1 (25 is a good start), got {nodes!r}"
            )
        rules = ("auto", *RULES, *registry.names("acceptance"))
        if rule in VLLM_RULES:
            raise ValueError(
                f"speculative_config['rejection_sample_method']: {rule!r} is vLLM's rule for chains and cannot verify "
                f"a tree; remove the key or use one of {_names(rules)}"
            )
        if rule not in rules and self.acceptance is None:
            raise ValueError(
                f"speculative_config['rejection_sample_method'] must be one of {_names(rules)}, got {rule!r}"
            )

    @classmethod
    def parse(cls, speculative_config: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split a speculative_config into our options and the keys that go on to vLLM ("model" among them).

        Raises:
            ValueError: for an unknown, missing, refused or ill-valued key; the message names it and the remedy.
        """
        given = {key.replace("-", "_"): value for key, value in speculative_config.items()}
        method = given["method"]
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
        tree, rest = _tree_options(given.get("tree", {}), method)
        rule = given.get("rejection_sample_method", "auto")
        options = cls(
            method=method,
            num_speculative_tokens=given["num_speculative_tokens"],
            rejection_sample_method=rule,
            tree=tree,
            proposer=None if method in METHODS else registry.path_of("proposer", method),
            acceptance=registry.path_of("acceptance", rule) if isinstance(rule, str) and rule not in RULES else None,
            tree_given=rest,
        )
        return options, {key: given[key] for key in ("model", *VLLM_KEYS) if key in given}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "tree": OPTIONS.get(data["method"], MethodOptions)(**data["tree"])})


def is_tree_method(speculative_config: Any) -> bool:
    """Whether this project is asked for; anything else is vLLM's own business."""
    if not isinstance(speculative_config, Mapping):
        return False
    method = speculative_config.get("method")
    return isinstance(method, str) and (method in METHODS or registry.path_of("proposer", method) is not None)


def _tree_options(tree: Any, method: str) -> tuple[MethodOptions, dict[str, Any]]:
    """The options of a built-in method; or those of all methods, and the rest for a registered proposer."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"speculative_config['tree'] must be a mapping of options, got {tree!r}")
    given = {key.replace("-", "_"): value for key, value in tree.items()}
    cls = OPTIONS.get(method, MethodOptions)
    known = tuple(one.name for one in fields(cls))
    rest = {}
    if "draft" in given:
        raise ValueError(
            "speculative_config['tree']['draft'] means nothing yet: this release drafts with an independent model, "
            "told by its checkpoint; remove the key"
        )
    for key, value in given.items():
        if key not in known and method in OPTIONS:
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is not an option of {method!r}; known options: {_names(known)}"
            )
        if key not in known:
            rest[key] = value
    return cls(**{key: value for key, value in given.items() if key in known}), rest


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
