"""Kinds of heads that other software serves and this release does not: they are recognised, and refused by name."""

from typing import Any

from vllm_adaptive_tree.config import UNSERVED
from vllm_adaptive_tree.engine.drafts.base import DraftKind


class Unserved(DraftKind):
    served = False

    def __init__(self, name: str, **signs: Any):
        super().__init__(name)
        vars(self).update(signs, title=UNSERVED[name])


KINDS = (
    Unserved(
        "medusa",
        model_type="medusa",
        architecture="(?i)medusa",
        keys=("medusa_num_heads",),
        tensors=(r"medusa_heads?\.|lm_heads\.|blocks\.\d+\.layers\.|\d+\.",),
    ),
    Unserved(
        "mlp_speculator", model_type="mlp_speculator", architecture="(?i)mlpspeculator", tensors=(r"speculator\.",)
    ),
)
