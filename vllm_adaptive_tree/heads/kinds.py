"""Kinds of drafts that can be trained: each with its lessons and its format."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vllm_adaptive_tree.heads import checkpoint
from vllm_adaptive_tree.heads.block_training import BlockTeacher
from vllm_adaptive_tree.heads.dspark import Block, BlockHead
from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head
from vllm_adaptive_tree.heads.layers import LayersTeacher
from vllm_adaptive_tree.heads.training import Teacher, Teaches


class Draft(NamedTuple):
    """A draft of any kind, as it is before its training."""

    module: nn.Module
    teacher: Teaches
    write: Callable[[Path], None]  # its checkpoint, into a folder


def eagle3_head(target: Any, config: Mapping[str, Any], layers: Sequence[int], draft_ids: Tensor | None) -> Draft:
    """EAGLE-3 head of `target`, a model of transformers with `config.json` `config`, which reads inputs of `layers`.

    Args:
        draft_ids: [D] int64, ascending: the target's ids of the head's own vocabulary; None: it is the target's.
    """
    teacher = Teacher(target, layers, draft_ids)
    head = Head(Dimensions.of(config), len(layers), None if draft_ids is None else len(draft_ids))
    teacher.initialise(head)
    return Draft(head, teacher, lambda folder: checkpoint.write(folder, head, config, layers, draft_ids))


def block_head(
    target: Any,
    config: Mapping[str, Any],
    layers: Sequence[int],
    draft_ids: Tensor | None,
    block: Block,
    tokens: Tensor,
) -> Draft:
    """One-forward head of `target`, arguments as for `eagle3_head`; its bias begins with the pairs of `tokens`, a flat
    text."""
    teacher = BlockTeacher(target, layers, block.depth, block.mask, draft_ids)
    head = BlockHead(Dimensions.of(config), len(layers), block, None if draft_ids is None else len(draft_ids))
    teacher.initialise(head, tokens)
    return Draft(head, teacher, lambda folder: checkpoint.write_block(folder, head, config, layers, draft_ids))


def target_layers(target: Any, config: Mapping[str, Any], count: int) -> Draft:
    """Independent draft of `count` of the layers of `target`."""
    teacher = LayersTeacher(target)
    draft = teacher.draft(count)
    return Draft(draft, teacher, partial(checkpoint.write_layers, draft=draft, target=config))
