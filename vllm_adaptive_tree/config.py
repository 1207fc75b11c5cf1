"""What a user may write into `speculative_config`, validated once, with the remedy in the error."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from vllm_adaptive_tree.acceptance import REGISTERED, RULES, VLLM_RULES
from vllm_adaptive_tree.drafters import CHECKPOINTS, DRAFTERS
from vllm_adaptive_tree.options import Options
from vllm_adaptive_tree.proposers import PROPOSERS, MethodOptions

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
"""Keys of vLLM's own speculative_config that keep their meaning with a tree method."""

OUR_KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method", "tree")

UNSERVED = {
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "xpress": "an XPress head",
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
}
"""Kinds of drafts that other software serves and this release does not, and what to call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """All of this project's options in one `speculative_config`."""

    method: str
    num_speculative_tokens: int
    rejection_sample_method: str
    tree: MethodOptions
    """The method's `Proposer.Options`."""
    proposer: str
    """Import path of the method's class; a registered name is unknown in other processes."""
    acceptance: str | None = None
    """Import path of the rule, unless it is built in."""
    draft: str | None = None
    """Kind of the draft: one of `CHECKPOINTS`, or the name of a draft without a checkpoint; None: told by the
    checkpoint."""
    drafter: str | None = None
    """Import path of a draft without a checkpoint."""
    lookup: Options | None = None
    """The options of that draft, of its class's `Options`."""

    def __post_init__(self) -> None:
        nodes, rule = self.num_speculative_tokens, self.rejection_sample_method
        if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
            raise ValueError(
                "speculative_config['num_speculative_tokens'] is the node budget per request and step: give a whole "
                f"number of at least 1 (25 is a good start), got {nodes!r}"
            )
        rules = ("auto", *RULES, *REGISTERED.names())
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
        """Split a speculative_config into our options and the keys passed on to vLLM (including "model").

        Raises:
            ValueError: for an unknown, missing, refused or invalid key; the message names it and the remedy.
        """
        given = {key.replace("-", "_"): value for key, value in speculative_config.items()}
        method = given["method"]
        for key in given:
            if key not in OUR_KEYS + VLLM_KEYS:
                if key == "parallel_drafting":
                    raise ValueError(f"speculative_config[{key!r}] asks for a draft of one forward; {served()}")
                raise ValueError(
                    f"speculative_config[{key!r}] has no meaning with method {method!r}; remove it. "
                    f"Known keys: {_names(OUR_KEYS + VLLM_KEYS)}"
                )
        model, tree = given.get("model"), given.get("tree", {})
        own = isinstance(tree, Mapping) and tree.get("draft") == "mtp"  # MTP layers may be the target's own
        for key, what in (("model", "the draft"), ("num_speculative_tokens", "the node budget, 25 for example")):
            if given.get(key) is None and not (key == "model" and own):
                raise ValueError(f"speculative_config[{key!r}] is missing: method {method!r} needs {what}")
        if model is not None and (not isinstance(model, str) or not model):
            raise ValueError(f"speculative_config['model'] must name the draft, got {model!r}")
        proposer = PROPOSERS.path(method)
        if proposer is None:
            raise ValueError(
                f"speculative_config['method']: {method!r} is no tree method; use one of {_names(PROPOSERS.names())}"
            )
        rule = given.get("rejection_sample_method", "auto")
        draft, drafter = _draft(model, tree)
        of_method, lookup = _tree_options(tree, method, PROPOSERS.load(proposer).Options, drafter)
        options = cls(
            method=method,
            num_speculative_tokens=given["num_speculative_tokens"],
            rejection_sample_method=rule,
            tree=of_method,
            proposer=proposer,
            acceptance=REGISTERED.path(rule) if isinstance(rule, str) and rule not in RULES else None,
            draft=draft,
            drafter=drafter,
            lookup=lookup,
        )
        return options, {key: given[key] for key in ("model", *VLLM_KEYS) if key in given}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        tree, lookup = PROPOSERS.load(data["proposer"]).Options(**data["tree"]), None
        if data["drafter"] is not None:
            lookup = DRAFTERS.load(data["drafter"]).Options(**data["lookup"])
        return cls(**{**data, "tree": tree, "lookup": lookup})


def is_tree_method(speculative_config: Any) -> bool:
    """Whether the method is one of ours or a registered one; anything else is left to vLLM."""
    if not isinstance(speculative_config, Mapping):
        return False
    method = speculative_config.get("method")
    return isinstance(method, str) and PROPOSERS.path(method) is not None


def served() -> str:
    """The end of an error about a draft."""
    return (
        "this release drafts with an independent model, an EAGLE or EAGLE-3 head, the target's MTP layers, or 'model': "
        f"{' or '.join(map(repr, DRAFTERS.names()))}"
    )


def _draft(model: str | None, tree: Any) -> tuple[str | None, str | None]:
    """The kind of the draft as the user gives it, and the import path of a draft without a checkpoint.

    A folder in the working directory comes before a draft of the same name.
    """
    said = tree.get("draft") if isinstance(tree, Mapping) else None
    kinds = CHECKPOINTS + DRAFTERS.names()
    name = said if said is not None or model is None or Path(model).is_dir() else model
    key = "['model']" if said is None else "['tree']['draft']"
    if name in tuple(UNSERVED) and name not in kinds:
        raise ValueError(f"speculative_config{key} asks for {UNSERVED[name]}, not served yet; {served()}")
    if said is not None and said not in kinds:
        raise ValueError(f"speculative_config['tree']['draft'] must be one of {_names(kinds)}, got {said!r}")
    path = DRAFTERS.path(name) if name is not None else None
    if said is not None and path is not None and said != model:
        raise ValueError(
            f"speculative_config['tree']['draft'] is {said!r}, which has no checkpoint: give 'model' as {said!r} too, "
            f"not {model!r}"
        )
    return (said, None) if path is None else (name, path)


def _tree_options(
    tree: Any, method: str, options: type[MethodOptions], drafter: str | None
) -> tuple[MethodOptions, Options | None]:
    """The method's options, and those of a draft without a checkpoint."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"speculative_config['tree'] must be a mapping of options, got {tree!r}")
    given = {key.replace("-", "_"): value for key, value in tree.items()}
    given.pop("draft", None)
    own = None if drafter is None else DRAFTERS.load(drafter).Options
    known = tuple(one.name for one in fields(options))
    of_draft = () if own is None else tuple(one.name for one in fields(own))
    for key in given:
        if key not in (*known, *of_draft):
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is not an option of {method!r}; known options: "
                f"{_names(('draft', *known, *of_draft))}"
            )
    return options(**{key: given[key] for key in given if key in known}), (
        None if own is None else own(**{key: given[key] for key in given if key in of_draft and key not in known})
    )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
