"""Options that a user may write into `speculative_config`, validated once, with the remedy in the error."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from vllm_adaptive_tree.acceptance import RULES, VLLM_RULES
from vllm_adaptive_tree.drafters import DRAFT_KINDS, DRAFTERS, TEXT_KIND, Lookup, TextDrafter
from vllm_adaptive_tree.options import COUNT, Options, is_count
from vllm_adaptive_tree.proposers import PROPOSERS, MethodOptions
from vllm_adaptive_tree.registry import imported

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
    "medusa": "Medusa heads, which vLLM 0.33 has removed",
    "mlp_speculator": "an MLP speculator",
}
"""Kinds of drafts that other software serves and this release does not, and their names in errors."""


@dataclass(frozen=True, slots=True)
class TextDraft:
    """A draft without a checkpoint."""

    path: str
    """Import path of its `TextDrafter`."""
    options: Options
    """Options of that class."""
    by_default: bool = False
    """True if the method brings it, and nobody has asked for it."""

    @property
    def drafter(self) -> type[TextDrafter]:
        return DRAFTERS.load(self.path)

    def build(self, vocabulary: int, *, compiled: bool = False) -> TextDrafter:
        """Make the draft; `compiled`: its class for CPUs, if there is one."""
        drafter = self.drafter
        path = vars(drafter).get("compiled") if compiled else None  # not inherited: a subclass may draft otherwise
        made: type[TextDrafter] = drafter if path is None else imported(path)
        return made.build(self.options, vocabulary=vocabulary)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> "TextDraft | None":
        if data is None:
            return None
        return cls(data["path"], DRAFTERS.load(data["path"]).Options(**data["options"]), data["by_default"])


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
    """Import path of the rule; None: that of `auto`."""
    draft: str | None = None
    """Name of the draft's kind in `DRAFT_KINDS`, or of a draft without a checkpoint; None: detected from the
    checkpoint."""
    kind: str | None = None
    """Import path of its `DraftKind`."""
    text: TextDraft | None = None
    """The draft, if it has no checkpoint."""
    lookup: TextDraft | None = None
    """Continuations to merge into the trees of the draft."""
    levels: int | None = None
    """Levels that a draft of one forward predicts, by its checkpoint, whatever the number of nodes; None: any."""
    slots_ahead: int | None = None
    """Slots of the KV cache that the draft writes after those of a step; None: as many as vLLM says."""

    def __post_init__(self) -> None:
        nodes, rule = self.num_speculative_tokens, self.rejection_sample_method
        if not is_count(nodes):
            raise ValueError(
                "speculative_config['num_speculative_tokens'] is the node budget per request and step: give "
                f"{COUNT} (25 is a good start), got {nodes!r}"
            )
        rules = ("auto", *RULES)
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
        given = _by_name(speculative_config, "speculative_config")
        method = given.get("method")
        if not isinstance(method, str) or method not in PROPOSERS:
            closest = _closest(str(method), tuple(PROPOSERS))
            raise ValueError(
                f"speculative_config['method']: {method!r} is no tree method; "
                f"{f'did you mean {closest!r}? ' if closest else ''}use one of {_names(tuple(PROPOSERS))}"
            )
        for key in given:
            if key not in OUR_KEYS + VLLM_KEYS:
                if key == "parallel_drafting":
                    raise ValueError(
                        f"speculative_config[{key!r}] is of vLLM's chains; remove it: a P-EAGLE head is told by its "
                        f"checkpoint, and PARD drafts are not served yet; {supported_drafts_hint()}"
                    )
                if key.startswith("synthetic_acceptance_"):
                    raise ValueError(
                        f"speculative_config[{key!r}]: a tree method accepts what its target says, also under a test's "
                        "load; remove the key, or use it with a chain ('draft_model')"
                    )
                inner = _keys_of_tree(method)
                if key in inner:
                    raise ValueError(f"speculative_config[{key!r}] belongs into 'tree': move it there")
                closest = _closest(key, OUR_KEYS + VLLM_KEYS + inner)
                remedy = (
                    f"did you mean {closest!r}{', in tree' if closest in inner else ''}?" if closest else "remove it."
                )
                raise ValueError(
                    f"speculative_config[{key!r}] has no meaning with method {method!r}; {remedy} "
                    f"Known keys: {_names(OUR_KEYS + VLLM_KEYS)}"
                )
        model, tree = given.get("model"), given.get("tree", {})
        if not isinstance(tree, Mapping):
            raise ValueError(f"speculative_config['tree'] must be a mapping of options, got {tree!r}")
        tree = _by_name(tree, "speculative_config['tree']")
        said = tree.get("draft")
        if model is None and said in DRAFTERS:
            model = given["model"] = said
        kind = DRAFT_KINDS.paths.get(said) if isinstance(said, str) else None
        of_target = model is None and kind is not None and DRAFT_KINDS.load(kind).part_of_target
        for key, what in (("model", "the draft"), ("num_speculative_tokens", "the node budget, 25 for example")):
            if given.get(key) is None and not (key == "model" and of_target):
                raise ValueError(f"speculative_config[{key!r}] is missing: method {method!r} needs {what}")
        if model is not None and (not isinstance(model, str) or not model):
            raise ValueError(f"speculative_config['model'] must name the draft, got {model!r}")
        proposer = PROPOSERS.paths[method]
        rule = given.get("rejection_sample_method", "auto")
        draft, path = _draft(model, tree)
        of_method, text, lookup = _tree_options(tree, method, PROPOSERS.load(proposer).Options, path)
        options = cls(
            method=method,
            num_speculative_tokens=given["num_speculative_tokens"],
            rejection_sample_method=rule,
            tree=of_method,
            proposer=proposer,
            acceptance=RULES.paths.get(rule) if isinstance(rule, str) else None,
            draft=draft,
            kind=kind if path is None else TEXT_KIND,
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
    """Return whether the method is one of ours or a registered one; any other is left to vLLM."""
    if not isinstance(speculative_config, Mapping):
        return False
    method = speculative_config.get("method")
    return isinstance(method, str) and method in PROPOSERS


def supported_drafts_hint() -> str:
    """Hint at the supported drafts, the end of an error about a draft."""
    return (
        "this release drafts with an independent model, an EAGLE, EAGLE-3 or P-EAGLE head, the target's MTP layers, "
        "a DFlash, DFlash2, LiLiCorr, DSpark or XPress head, or 'model': "
        f"{' or '.join(map(repr, DRAFTERS))}{_registered_kinds()}"
    )


def _registered_kinds() -> str:
    names = [repr(name) for name in DRAFT_KINDS if name not in DRAFT_KINDS.built_in]
    return f", or a draft of the registered kinds {', '.join(names)}" if names else ""


def _by_name(given: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Options with underscores in place of dashes.

    Raises:
        ValueError: a key is no text, or two are the same option.
    """
    written = dict[str, str]()
    for key in given:
        if not isinstance(key, str):
            raise ValueError(f"{where}: the key {key!r} is no text; give the name of an option in its place")
        name = key.replace("-", "_")
        if name in written:
            raise ValueError(f"{where} has {written[name]!r} and {key!r}, two spellings of one option; remove one")
        written[name] = key
    return {name: given[key] for name, key in written.items()}


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "params.json"))


def _draft(model: str | None, tree: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Kind of the draft as the user gives it, and the import path of a draft without a checkpoint.

    A checkpoint in the working directory comes before a draft of the same name, another folder does not: `new-method`
    writes one.
    """
    said = tree.get("draft")
    kinds = (*DRAFT_KINDS, *DRAFTERS)
    name = said if said is not None or model is None or _is_checkpoint(Path(model)) else model
    key = "['model']" if said is None else "['tree']['draft']"
    if name in tuple(UNSERVED) and name not in kinds:
        raise ValueError(f"speculative_config{key} asks for {UNSERVED[name]}, not served; {supported_drafts_hint()}")
    if said is not None and said not in kinds:
        raise ValueError(f"speculative_config['tree']['draft'] must be one of {_names(kinds)}, got {said!r}")
    path = DRAFTERS.paths.get(name) if name is not None else None
    if said is not None and path is not None and said != model:
        raise ValueError(
            f"speculative_config['tree']['draft'] is {said!r}, which has no checkpoint: give 'model' as {said!r} too, "
            f"not {model!r}"
        )
    return (said, None) if path is None else (name, path)


def _tree_options(
    tree: Mapping[str, Any], method: str, options: type[MethodOptions], text: str | None
) -> tuple[MethodOptions, TextDraft | None, TextDraft | None]:
    """Options of the method; the draft, if it has an import path `text` and no checkpoint; and the look-up to merge."""
    given = dict(tree)
    given.pop("draft", None)
    by_default = text is None and "lookup" not in given
    paths = text, _lookup(given.pop("lookup", options.lookup if by_default else None))
    if text is not None and paths[1] == text:
        raise ValueError("speculative_config['tree']['lookup'] is the draft itself; remove it")
    for key, path in zip(("['model']", "['tree']['lookup']"), paths, strict=True):
        required = None if path is None else DRAFTERS.load(path).requires
        if required is not None and find_spec(required[0]) is None:
            raise ValueError(
                f"speculative_config{key} needs the module {required[0]!r}, which is missing; {required[1]}"
            )
    classes = [options, *(DRAFTERS.load(path).Options for path in paths if path is not None)]
    known = [name for cls in classes for name in _fields(cls)]
    for key in given:
        if key not in known and key in _keys_of_drafts():
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is an option of a look-up: give 'model' or 'lookup' as one, or "
                "remove it"
            )
        if key not in known and key in OUR_KEYS + VLLM_KEYS:
            raise ValueError(f"speculative_config['tree'][{key!r}] belongs beside 'method', not into 'tree': move it")
        if key not in known:
            names = ("draft", "lookup", *known)
            closest = _closest(key, names)
            raise ValueError(
                f"speculative_config['tree'][{key!r}] is not an option of {method!r}; "
                f"{f'did you mean {closest!r}? ' if closest else ''}known options: {_names(names)}"
            )
    defaults: dict[str, Any] = {field.name: field.default for field in fields(options)}
    deeper = max(defaults.get("max_depth", TEXT_DEPTH), TEXT_DEPTH)
    chosen = given if text is None else {"max_depth": deeper, **given}
    of_method = options(**{key: value for key, value in chosen.items() if key in _fields(options)})
    drafts = []
    for path in paths:
        option_class = None if path is None else DRAFTERS.load(path).Options
        mine = {key: value for key, value in given.items() if option_class is not None and key in _fields(option_class)}
        drafts.append(None if option_class is None or path is None else TextDraft(path, option_class(**mine)))
    if drafts[1] is not None:
        drafts[1] = replace(drafts[1], by_default=by_default)
    return of_method, drafts[0], drafts[1]


def _lookup(name: Any) -> str | None:
    """Import path of the `Lookup` that `tree: {"lookup": name}` asks for."""
    if name is None:
        return None
    names = tuple(name for name, drafter in DRAFTERS.items() if issubclass(drafter, Lookup))
    if name not in names:
        raise ValueError(f"speculative_config['tree']['lookup'] must be one of {_names(names)}, got {name!r}")
    return DRAFTERS.paths[name]


def _keys_of_drafts() -> set[str]:
    """Options of the built-in drafts without a checkpoint."""
    return {key for path in DRAFTERS.built_in.values() for key in _fields(DRAFTERS.load(path).Options)}


def _keys_of_tree(method: Any) -> tuple[str, ...]:
    """What `tree` may hold with this method."""
    path = PROPOSERS.paths.get(method) if isinstance(method, str) else None
    own = () if path is None else _fields(PROPOSERS.load(path).Options)
    return ("draft", "lookup", *own, *sorted(_keys_of_drafts()))


def _closest(key: str, names: tuple[str, ...]) -> str | None:
    """The name that a mistyped key means."""
    return next(iter(difflib.get_close_matches(key, names, n=1, cutoff=0.7)), None)


def _fields(options: type[Options]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(options))


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
