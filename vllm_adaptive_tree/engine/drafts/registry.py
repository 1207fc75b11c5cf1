"""Kind of a draft: by its checkpoint, or by the options of an engine.

Its path does not matter, whereas vLLM takes a folder whose name contains "eagle3" for an EAGLE-3 head, whatever is in
it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.config import TreeOptions, supported_drafts_hint
from vllm_adaptive_tree.drafters import DRAFT_KINDS
from vllm_adaptive_tree.engine.checkpoint import Checkpoint, Shape, tensor_shapes, written_config
from vllm_adaptive_tree.engine.drafts import unserved
from vllm_adaptive_tree.engine.drafts.base import DraftKind

OTHER = "a draft head of a kind that is not known here"


class Fact(NamedTuple):
    kind: DraftKind | None
    """None: it is not known here."""
    why: str
    weak: bool = False
    """True if vLLM would also load the checkpoint as another kind, if it is told to."""

    def __str__(self) -> str:
        return f"{OTHER if self.kind is None else self.kind.title} ({self.why})"


@cache
def _kind(path: str, name: str) -> DraftKind:
    return DRAFT_KINDS.load(path)(name)


def kind_in(options: TreeOptions) -> DraftKind:
    """Kind of the draft in an engine process, which knows a registered one only by its path."""
    return _kind(str(options.kind), str(options.draft))


def kinds() -> list[DraftKind]:
    """Kinds in the order in which they are asked: the last of a list first, since it may refine an earlier one."""
    names = [*DRAFT_KINDS.built_in, *(name for name in DRAFT_KINDS if name not in DRAFT_KINDS.built_in)]
    known = len(DRAFT_KINDS.built_in)
    registered, built_in = (
        [_kind(DRAFT_KINDS.paths[name], name) for name in reversed(part)] for part in (names[known:], names[:known])
    )
    return [*registered, *unserved.KINDS, *built_in]


def find(args: Any, options: TreeOptions, keys: dict[str, Any]) -> tuple[DraftKind, Checkpoint]:
    """Kind and checkpoint of the draft, which has been checked; without a checkpoint an empty one. `keys`: vLLM's of
    the speculative_config, completed here if the draft is in the target's own checkpoint."""
    from vllm.transformers_utils.config import get_config

    if options.text is not None:
        return kind_in(options), Checkpoint(keys["model"], {}, None)
    if keys.get("model") is None:
        of_target = {"model": args.model, "revision": args.revision, "quantization": args.quantization}
        keys |= {**of_target, **{key: value for key, value in keys.items() if value is not None}}
    revision = keys.get("revision")
    with _readable(keys["model"]):
        draft = Checkpoint.read(keys["model"], revision, args.trust_remote_code)
    kind = kind_of(draft, said=options.draft, target=args.model)
    with _readable(draft.model):
        config = get_config(draft.model, args.trust_remote_code, revision=revision)
    kind.check(args, draft, config, keys)
    return kind, draft


def kind_of(draft: Checkpoint, *, said: str | None, target: str) -> DraftKind:
    """Kind of a draft with a checkpoint.

    Args:
        said: the kind that the user gives.
        target: the target's folder or hub name; MTP layers are often in the same one.

    Raises:
        ValueError: the kind is not served, or the user, the config and the tensors contradict each other.
    """
    given = None if said is None else _kind(DRAFT_KINDS.paths[said], said)
    config = by_config(draft.config)
    if config is None and given is None and _same(draft.model, target):
        config = _in_target(draft.config)
    tensors = by_tensors(draft.tensors or {})
    if any(kind is not None and not kind.told_by_tensors for kind in (given, config and config.kind)):
        tensors = None
    for fact in (config, tensors):
        if fact is not None and (fact.kind is None or not fact.kind.served):
            raise draft.refused(f"is {fact}, not served; {supported_drafts_hint()}")
    if given is None and config is not None and tensors is not None and config.kind is not tensors.kind:
        remedy = ", or give the kind in 'tree' as 'draft'" if config.weak else ""
        raise draft.refused(
            f"is {config} by its config.json, and {tensors} by its tensors; correct the config.json{remedy}"
        )
    for fact in (tensors, None if config is None or config.weak else config):
        if given is not None and fact is not None and fact.kind is not given:
            raise ValueError(
                f"speculative_config['tree']['draft'] is {said!r}, and {draft.model!r} is {fact}; remove 'draft', or "
                "give another checkpoint as 'model'"
            )
    return given or (config or tensors or Fact(None, "")).kind or kinds()[-1]


def by_config(config: Mapping[str, Any]) -> Fact | None:
    """Kind by a config.json; None: it names none, as that of an independent model."""
    facts = (Fact(kind, why) for kind in kinds() if (why := kind.in_config(config)) is not None)
    if (name := config.get("speculators_model_type")) is not None:
        return next(facts, Fact(None, f"speculators_model_type {name!r}"))
    weak = (Fact(kind, why, weak=True) for kind in kinds() if (why := kind.in_keys(config)) is not None)
    return next(facts, None) or next(weak, None)


def by_tensors(tensors: Mapping[str, Shape | None]) -> Fact | None:
    """Kind by the names and shapes of tensors; None if there are none."""
    telling = (kind for kind in kinds() if kind.told_by_tensors)
    facts = (Fact(kind, why) for kind in telling if (why := kind.in_tensors(tensors)) is not None)
    names = ", ".join(sorted(tensors)[:3])
    return next(facts, Fact(None, f"no token embedding among its tensors ({names}, ...)") if names else None)


def _in_target(config: Mapping[str, Any]) -> Fact | None:
    parts = config, config.get("text_config") or {}
    signs = ((kind, key, part.get(key)) for part in parts for kind in kinds() for key in kind.target_keys)
    facts = (Fact(kind, f"the target itself, {key} {value}", weak=True) for kind, key, value in signs if value)
    return next(facts, None)


def _same(model: str, target: str) -> bool:
    folders = Path(model), Path(target)
    return model == target or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))


@contextmanager
def _readable(model: str) -> Iterator[None]:
    """Raise ValueError with the remedy if the checkpoint of a draft cannot be read."""
    try:
        yield
    except Exception as error:
        part = DRAFT_KINDS[model].part_of_target if model in DRAFT_KINDS else None
        hint = "" if part is None else f', or tree: {{"draft": "{model}"}} for {part}'
        raise ValueError(
            f"speculative_config['model']: cannot read a draft at {model!r}; give a local folder or a hub name with a "
            f"config.json{hint} ({type(error).__name__}: {error}); {supported_drafts_hint()}"
        ) from error


def check_target(args: Any) -> None:
    """Refuse a head in place of the target."""
    try:
        written = written_config(args.model, args.revision, args.trust_remote_code)
    except Exception:  # vLLM reports it
        return
    refuse_head(args.model, written, tensor_shapes(args.model, args.revision, ask_hub=False))


def refuse_head(model: str, written: Mapping[str, Any], shapes: Mapping[str, Shape | None] | None) -> None:
    """Refuse a target that is a head. From one of speculators vLLM would load its verifier, and draft with a method of
    its own; another would fail in its loader."""
    if (speculators := written.get("speculators_config")) is not None:
        verifier = (speculators.get("verifier") or {}).get("name_or_path")
        raise ValueError(
            f"model: {model!r} is a head in the format of speculators, for the target {verifier!r}; give the "
            f"target as the model, and {model!r} as speculative_config['model']"
        )
    tensors = by_tensors(shapes or {})
    config = by_config(written)
    whole = tensors is not None and tensors.kind is not None and tensors.kind.independent
    if config is not None and config.weak and whole:
        return  # a key that some model has, too
    for fact in (config, tensors):
        if fact is not None and fact.kind is not None and not fact.kind.independent:
            raise ValueError(
                f"model: {model!r} is {fact}, which drafts for a target and is none; give its target as the "
                f"model, and {model!r} as speculative_config['model']"
            )
