"""What a user may write into `speculative_config`, validated once, with the remedy in the error."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from vllm_adaptive_tree.acceptance import REGISTERED, RULES, VLLM_RULES
from vllm_adaptive_tree.drafters import CHECKPOINTS, DRAFTERS, Lookup, TextDrafter
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

TEXT_DEPTH = 16
"""Least default of `max_depth` for drafts without a checkpoint: copies are long."""

UNSERVED = {
    "mlp_speculator": "an MLP speculator",
    "xpress": "an XPress head",
}
"""Kinds of drafts that other software serves and this release does not, and what to call them."""


@dataclass(frozen=True, slots=True)
class TextDraft:
    """A draft without a checkpoint."""

    path: str
    """Import path of its `TextDrafter`."""
    options: Options
    """Of that class."""

    def build(self, vocabulary: int) -> TextDrafter:
        return DRAFTERS.load(self.path).build(self.options, vocabulary=vocabulary)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> "TextDraft | None":
        return None if data is None else cls(data["path"], DRAFTERS.load(data["path"]).Options(**data["options"]))


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
    text: TextDraft | None = None
    """The draft, if it has no checkpoint."""
    lookup: TextDraft | None = None
    """Continuations to merge into the trees of the draft."""
    levels: int | None = None
    """Levels that a draft of one forward predicts: its checkpoint's, whatever the number of nodes; None: any."""

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
                    raise ValueError(
                        f"speculative_config[{key!r}] is of vLLM's chains; remove it: a P-EAGLE head is told by its "
                        f"checkpoint, and PARD drafts are not served yet; {served()}"
                    )
                if key.startswith("synthetic_acceptance_"):
                    raise ValueError(
                        f"speculative_config[{key!r}]: a tree method accepts what its target says, also under a test's "
                        "load; remove the key, or use it with a chain ('draft_model')"
                    )
                if key in ("draft", "lookup", *_keys_of_drafts()):
                    raise ValueError(f"speculative_config[{key!r}] belongs into 'tree': move it there")
                raise ValueError(
                    f"speculative_config[{key!r}] has no meaning with method {method!r}; remove it. "
                    f"Known keys: {_names(OUR_KEYS + VLLM_KEYS)}"
                )
        model, tree = given.get("model"), given.get("tree", {})
        said = tree.get("draft") if isinstance(tree, Mapping) else None
        if model is None and said in DRAFTERS.names():
            model = given["model"] = said
        own = said == "mtp"  # MTP layers may be the target's own
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
        draft, path = _draft(model, tree)
        of_method, text, lookup = _tree_options(tree, method, PROPOSERS.load(proposer).Options, path)
        options = cls(
            method=method,
            num_speculative_tokens=given["num_speculative_tokens"],
            rejection_sample_method=rule,
            tree=of_method,
            proposer=proposer,
            acceptance=REGISTERED.path(rule) if isinstance(rule, str) and rule not in RULES else None,
            draft=draft,
            text=text,
            lookup=lookup,
        )
        return options, {key: given[key] for key in ("model", *VLLM_KEYS) if key in given}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        tree = PROPOSERS.load(data["proposer"]).Options(**data["tree"])
        texts = {name: TextDraft.from_json(data[name]) for name in ("text", "lookup")}
        return cls(**{**data, "tree": tree, **texts})


def is_tree_method(speculative_config: Any) -> bool:
    """Whether the method is one of ours or a registered one; anything else is left to vLLM."""
    if not isinstance(speculative_config, Mapping):
        return False
    method = speculative_config.get("method")
    return isinstance(method, str) and PROPOSERS.path(method) is not None


def served() -> str:
    """The end of an error about a draft."""
    return (
        "this release drafts with an independent model, an EAGLE, EAGLE-3 or P-EAGLE head, the target's MTP layers, "
        "Medusa heads, a DFlash, DFlash2, LiLiCorr or DSpark head, or 'model': "
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
    tree: Any, method: str, options: type[MethodOptions], text: str | None
) -> tuple[MethodOptions, TextDraft | None, TextDraft | None]:
    """The method's options; the draft, if it has no checkpoint but the import path `text`; and what to merge."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"speculative_config['tree'] must be a mapping of options, got {tree!r}")
    given = {key.replace("-", "_"): value for key, value in tree.items()}
    given.pop("draft", None)
    paths = text, _lookup(given.pop("lookup", None))
    if text is not None and paths[1] == text:
        raise ValueError("speculative_config['tree']['lookup'] is the draft itself; remove it")
    for key, path in zip(("['model']", "['tree']['lookup']"), paths, strict=True):
        required = None if path is None else DRAFTERS.load(path).requires
        if required is not None and find_spec(required[0]) is None:
            raise ValueError(
                f"speculative_config{key} needs the module {required[0]!r}, which is missing; {required[1]}"
            )
    classes = [options, *(DRAFTERS.load(path).Options for path in paths if path is not None)]
    known = [name for one in classes for name in _fields(one)]
    for key in given:
        if key not in known and key in _keys_of_drafts():
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is an option of a look-up: give 'model' or 'lookup' as one, or "
                "remove it"
            )
        if key not in known:
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is not an option of {method!r}; known options: "
                f"{_names(('draft', 'lookup', *known))}"
            )
    defaults: dict[str, Any] = {one.name: one.default for one in fields(options)}
    deeper = max(defaults.get("max_depth", TEXT_DEPTH), TEXT_DEPTH)
    chosen = given if text is None else {"max_depth": deeper, **given}
    of_method = options(**{key: value for key, value in chosen.items() if key in _fields(options)})
    found = []
    for path in paths:
        own = None if path is None else DRAFTERS.load(path).Options
        mine = {key: value for key, value in given.items() if own is not None and key in _fields(own)}
        found.append(None if own is None or path is None else TextDraft(path, own(**mine)))
    return of_method, found[0], found[1]


def _lookup(name: Any) -> str | None:
    """The import path of the `Lookup` that `tree: {"lookup": name}` asks for."""
    if name is None:
        return None
    names = tuple(one for one in DRAFTERS.names() if issubclass(DRAFTERS.load(str(DRAFTERS.path(one))), Lookup))
    if name not in names:
        raise ValueError(f"speculative_config['tree']['lookup'] must be one of {_names(names)}, got {name!r}")
    return DRAFTERS.path(name)


def _keys_of_drafts() -> set[str]:
    """Options of the built-in drafts without a checkpoint."""
    return {key for path in DRAFTERS.built_in.values() for key in _fields(DRAFTERS.load(path).Options)}


def _fields(options: type[Options]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(options))


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
