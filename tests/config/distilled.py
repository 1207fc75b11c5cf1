"""Kind of draft of a third party: a model whose config.json names the target that it was distilled from."""

from pathlib import Path
from typing import Any

from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.drafts.independent import Independent


class Distilled(Independent):
    title = "a distilled model"
    keys = ("distilled_from",)
    told_by_tensors = False  # they are those of any model

    def check(self, args: Any, draft: Checkpoint, config: Any, keys: dict[str, Any]) -> None:
        teacher = draft.config.get("distilled_from")
        if teacher != Path(args.model).name:
            raise draft.refused(f"was distilled from {teacher!r}; use a draft of {args.model!r}")
        super().check(args, draft, config, keys)
