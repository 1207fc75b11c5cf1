"""Base of all kinds of drafts: signs in a checkpoint, checks, and how vLLM loads and runs it.

vLLM is imported only where an engine needs it: options are read without it.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from vllm_adaptive_tree.engine.checkpoint import Checkpoint, Shape
from vllm_adaptive_tree.engine.drafts.causes import Check
from vllm_adaptive_tree.engine.targets import vocabulary
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.registry import imported

HEAD_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
"""Substrings of a draft's path that make vLLM take it for a head, whatever `method` says."""

EXTENSIBLE = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
"""Types of RoPE whose `max_position_embeddings` says no more than how many positions are tabulated."""


class DraftKind:
    """A kind of draft. It holds no state: the checkpoint is an argument, an empty one for a draft without."""

    required: ClassVar[tuple[str, ...]] = ("title", "method")
    title: ClassVar[str]  # its name in messages, with an article
    method: ClassVar[str]  # vLLM's
    built_as: ClassVar[str | None] = None  # method while vLLM builds the configuration; None: `method`
    judged_by_path: ClassVar[bool] = False  # True: vLLM may take it for a head by its path, whatever `method` says
    served: ClassVar[bool] = True

    # Import paths of the classes that run it on Model Runner V1 (`v1.drafter.V1Drafter`) and V2
    # (`v2.drafting.TreeDrafting`); None: it does not run there.
    proposer: ClassVar[str | None] = None
    replaces: ClassVar[str] = "EagleProposer"  # vLLM's class that V1 would create instead
    speculator: ClassVar[str | None] = None

    # Signs of it in a checkpoint: patterns, and keys of a config.json.
    speculators: ClassVar[str | None] = None  # `speculators_model_type`, literally
    model_type: ClassVar[str | None] = None  # of the whole value
    architecture: ClassVar[str | None] = None  # in one of `architectures`
    keys: ClassVar[tuple[str, ...]] = ()  # without other signs; vLLM would also load it as another kind, if told to
    tensors: ClassVar[tuple[str, ...]] = ()  # at the start of a name, without prefix
    told_by_tensors: ClassVar[bool] = True  # False: their names say nothing about it
    target_keys: ClassVar[tuple[str, ...]] = ()  # keys of a target's config.json
    part_of_target: ClassVar[str | None] = None  # its name, if it may be in the target's checkpoint, without a 'model'

    independent: ClassVar[bool] = False  # True: it reads tokens alone, and could be a target
    node_states: ClassVar[bool] = False  # True: its rows have a hidden state for each node; a head reads its parent's
    combines_states: ClassVar[bool] = False  # True: vLLM's class combines states of several layers of the target
    chain_keys: ClassVar[dict[str, Any]] = {}  # further keys of vLLM's own speculation with it
    causes: ClassVar[tuple[Check, ...]] = ()  # why a target may reject it, in the order of their likelihood

    def __init__(self, name: str):
        """`name`: under which it is registered; users write it into `tree` as "draft"."""
        self.name = name

    @property
    def import_path(self) -> str:
        return f"{type(self).__module__}:{type(self).__qualname__}"

    # -- recognition

    def in_config(self, config: Mapping[str, Any]) -> str | None:
        """Sign of this kind in a config.json; None: there is none."""
        if (name := config.get("speculators_model_type")) is not None:
            return f"speculators_model_type {name!r}" if name == self.speculators else None
        model_type = str(config.get("model_type", ""))
        if self.model_type is not None and re.fullmatch(self.model_type, model_type):
            return f"model_type {model_type!r}"
        return None if self.architecture is None else named_like(self.architecture, config)

    def in_keys(self, config: Mapping[str, Any]) -> str | None:
        """Sign of this kind among the keys of a config.json that names none."""
        keys = (key for key in self.keys if config.get(key) not in (None, False))
        return next((f"{key} in its config.json" for key in keys), None)

    def in_tensors(self, tensors: Mapping[str, Shape | None]) -> str | None:
        """Sign of this kind in the names and shapes of tensors, which those asked before do not have."""
        for pattern in self.tensors:
            if (name := next(filter(re.compile(pattern).match, sorted(tensors)), None)) is not None:
                return f"tensor {name!r}"
        return None

    # -- checks

    def check(self, args: Any, draft: Checkpoint, config: Any, keys: dict[str, Any]) -> None:
        """Refuse, before vLLM builds its configuration, drafts that it would refuse with another error or not at all.
        `args`: vLLM's EngineArgs; `config`: of the draft, as vLLM reads it; `keys`: of the speculative_config."""
        from vllm import envs
        from vllm.transformers_utils.config import get_config

        self.check_runner(draft, v2=envs.VLLM_USE_V2_MODEL_RUNNER)
        target = get_config(args.model, args.trust_remote_code, revision=args.revision)
        sizes = [part.get_text_config().vocab_size for part in (config, target)]
        check_vocabulary(draft, *sizes)
        if draft.model != args.model:
            tokenizer = (args.tokenizer, args.tokenizer_revision) if args.tokenizer else (args.model, args.revision)
            vocabulary.warn_of_another(draft.model, keys.get("revision"), *tokenizer)
        self.check_config(draft, config, sizes[0])
        check_ranks(draft, config.get_text_config(), args.tensor_parallel_size, keys)

    def check_config(self, draft: Checkpoint, config: Any, vocabulary: int) -> None:
        """Refuse what only this kind can have wrong. `config`: of the draft, as vLLM reads it."""

    def check_runner(self, draft: Checkpoint, *, v2: bool | None) -> None:
        """Refuse a model runner on which this kind does not run. `v2`: None: vLLM has not chosen one."""
        from vllm.platforms import current_platform

        if self.proposer is None and self.speculator is None:
            raise draft.refused(f"is {self.title}, whose kind has neither 'proposer' nor 'speculator'; set one of them")
        if self.speculator is None and (v2 or not current_platform.is_cpu()):
            raise draft.refused(
                f"is {self.title}, which vLLM runs on Model Runner V1 alone, on CPUs; use another draft, or set "
                "VLLM_USE_V2_MODEL_RUNNER=0 on a CPU"
            )
        if self.proposer is None and v2 is False:
            raise draft.refused(
                f"is {self.title}, which runs on Model Runner V2 alone; use another draft, or set "
                "VLLM_USE_V2_MODEL_RUNNER=1"
            )

    def check_method(self, pair: Pair) -> None:
        """Refuse a method that needs more of a draft than this kind gives."""
        if not self.independent and pair.init_width > 1:
            raise ValueError(
                "speculative_config['tree']['init_width'] above 1 needs an independent model, and the draft is "
                f"{self.name!r}; use init_width 1"
            )
        if not self.node_states and pair.proposer.hidden_size is not None:
            raise ValueError(
                f"speculative_config['tree']['stop'] 'type1' reads the draft's hidden states, and {self.name!r} has "
                "none of its nodes; use stop 'type2'"
            )

    # -- vLLM's configuration

    def levels(self, draft: Checkpoint) -> int | None:
        """Levels of a tree that the checkpoint predicts at once; None: any."""
        return None

    def slots_ahead(self, draft: Checkpoint) -> int | None:
        """Cache slots of a request that it writes after those of a step; None: as many as vLLM says."""
        return None

    def rewritten(self, draft: Checkpoint) -> dict[str, Any] | None:
        """The config.json from which vLLM builds its configuration; None: the checkpoint's own."""
        return None

    @contextmanager
    def built_from(self, draft: Checkpoint, keys: Mapping[str, Any]) -> Iterator[str]:
        """Path from which vLLM builds its configuration. `keys`: vLLM's of the speculative_config."""
        config = self.rewritten(draft)
        judged = self.judged_by_path and any(name in draft.model.lower() for name in HEAD_NAMES)
        if config is None and not judged:
            yield draft.model
            return
        with tempfile.TemporaryDirectory(prefix="draft") as scratch:
            folder = Path(scratch) / "draft"
            if config is None:
                files = local_files(draft.model, keys.get("revision"))
                folder.symlink_to(files.resolve(), target_is_directory=True)
            else:
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(config))
            yield str(folder)

    def restore(self, config: Any, model: str) -> None:
        """Write the user's `model` into a VllmConfig that was built from another path."""
        config.speculative_config.model = config.speculative_config.draft_model_config.model = model

    def finalize(self, config: Any, draft: Checkpoint) -> None:
        """Check a built VllmConfig against the checkpoint, and finalize it for vLLM's scheduler and loaders."""
        spec = config.speculative_config
        if spec.method != (self.built_as or self.method):
            raise draft.refused(f"is {self.title}, and vLLM can load it as {spec.method!r} only; use another draft")
        self.check_runner(draft, v2=config.use_v2_model_runner)
        path = str(self.speculator if config.use_v2_model_runner else self.proposer)
        if not path.startswith("vllm_adaptive_tree."):
            imported(path)  # before a worker does


def extend_context(config: Any) -> None:
    """Let the head of a built VllmConfig read to the end of the target's context, as vLLM's own methods do, if its
    positions have been extended to there and the user has named no `max_model_len` for it."""
    from vllm.transformers_utils.config import iter_rope_parameters

    spec = config.speculative_config
    head, longest = spec.draft_model_config, spec.target_model_config.max_model_len
    types = {parameters.get("rope_type", "default") for parameters in iter_rope_parameters(head.hf_config)}
    positions = getattr(head.hf_config, "max_position_embeddings", 0)
    if spec.max_model_len is None and positions >= longest and types <= EXTENSIBLE:
        head.max_model_len = longest


def named_like(pattern: str, config: Mapping[str, Any]) -> str | None:
    """Sign of a kind by the pattern of its architectures' names."""
    names = config.get("architectures") or ()
    return next((f"architecture {name!r}" for name in names if re.search(pattern, name)), None)


def local_files(model: str, revision: str | None) -> Path:
    """Folder of a model without its weights."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.model", "*.txt"]))


def check_vocabulary(draft: Checkpoint, size: int | None, of_target: int | None) -> None:
    if size != of_target:
        raise draft.refused(
            f"has a vocabulary of {size} tokens and the target one of {of_target}; use a draft trained with the "
            "target's tokenizer"
        )


def check_ranks(draft: Checkpoint, text: Any, ranks: int, keys: dict[str, Any]) -> None:
    """Refuse another number of ranks than the target's, and a draft that it does not divide. `text`: its config."""
    draft_ranks = keys.get("draft_tensor_parallel_size") or ranks
    if draft_ranks != ranks:
        raise ValueError(
            f"speculative_config['draft_tensor_parallel_size'] is {draft_ranks}, and tensor_parallel_size {ranks}; a "
            "tree method needs the same: remove the first"
        )
    heads = getattr(text, "num_attention_heads", None) or ranks
    kv = getattr(text, "num_key_value_heads", None) or heads
    units = getattr(text, "intermediate_size", None) or ranks
    for size, what, fits in (
        (heads, "attention heads", heads % ranks == 0),
        (kv, "K/V heads", kv % ranks == 0 or ranks % kv == 0),
        (units, "MLP units", units % ranks == 0),
    ):
        if not fits:
            raise draft.refused(
                f"has {size} {what}, which cannot be cut for tensor_parallel_size={ranks}; give a smaller size, or "
                "another draft"
            )
