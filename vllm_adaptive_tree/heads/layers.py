"""An independent draft made of a few of its target's layers, with the target's embeddings, and its lessons."""

import copy
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from vllm_adaptive_tree.heads.observations import Law, Observation, Observer


class LayersLesson(NamedTuple):
    law: Law  # [B, T]; row t is about token t + 1
    tokens: Tensor  # [B, T]


class LayersTeacher:
    """Frozen Llama-like target of transformers, which gives lessons for a draft of its own layers."""

    def __init__(self, target: Any):
        self.observe = Observer(target, ())
        self.target = self.observe.target

    def __call__(self, tokens: Tensor, seen: Observation | None = None) -> LayersLesson:
        """Lesson of `tokens` [B, T]; `seen`: the target's observation of them, if there is one."""
        return LayersLesson((self.observe(tokens) if seen is None else seen).law, tokens)

    def draft(self, count: int) -> Any:
        """The target's first `count - 1` layers and its last, trainable; embeddings and output are the target's.

        Raises:
            ValueError: the target has no more than `count` layers.
        """
        theirs = self.target.model.layers
        if count >= len(theirs):
            raise ValueError(f"--layers {count}: the target has only {len(theirs)}; give fewer")
        config = copy.deepcopy(self.target.config)
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types[: count - 1], config.layer_types[-1]]
        draft = type(self.target)(config).eval()
        for mine, its in zip(draft.model.layers, [*theirs[: count - 1], theirs[-1]], strict=True):
            mine.load_state_dict(its.state_dict())
        draft.model.norm.load_state_dict(self.target.model.norm.state_dict())
        draft.model.embed_tokens = self.target.model.embed_tokens  # frozen, as the target's other weights
        draft.lm_head = self.target.lm_head
        return draft

    def loss(self, draft: Any, lesson: LayersLesson, steps: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the target's distributions, and agreement [1]; `steps` is 1."""
        states = draft.model(lesson.tokens, use_cache=False).last_hidden_state
        logits = F.linear(states, self.target.lm_head.weight)
        agreement = (logits.argmax(-1) == lesson.law.best).float().mean()
        return lesson.law.cross_entropy(logits), agreement.repeat(steps)
