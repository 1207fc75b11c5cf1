"""Target-initialised trees (Lu et al., arXiv 2409.10644): first-layer candidates sampled from the target itself."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.walk import Accepted, walk
from vllm_adaptive_tree.trees import TreeBatch


def longest_continuation(
    tree: TreeBatch,
    initial: Tensor,
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    levels: int,
    most: int,
    proceed: Callable[[Tensor], bool] = lambda active: True,
) -> Accepted:
    """Walk below every initial token and keep the longest path; on ties the first.

    With one initial token this is `walk`. With more it is not lossless: the emitted token depends on how well the draft
    continues it.

    Args:
        initial: [R] number of a tree's first nodes that are initial tokens; 0: an ordinary walk from the root.
        draw, levels, proceed: as in `walk`; the draw at the root is used only for trees without initial tokens.
        most: upper bound of `initial`.
    """
    kept = Accepted(*tree.tokens.new_full((2, len(initial), levels + 1), -1))
    length = torch.full_like(initial, -1)
    for number in range(min(most, tree.tokens.shape[1])):

        def below(node: Tensor, active: Tensor, number: int = number) -> tuple[Tensor, Tensor]:
            token, may_go_on = draw(node, active)
            forced = (node < 0) & (initial > number)
            return torch.where(forced, tree.tokens[:, number], token), may_go_on | forced

        walked = walk(tree, below, levels=levels, proceed=proceed)
        accepted = (walked.nodes >= 0).sum(1)
        better = (accepted > length) & ((initial > number) | (number == 0))
        missing = (0, levels + 1 - walked.tokens.shape[1])
        padded = (torch.nn.functional.pad(part, missing, value=-1) for part in walked)
        kept = Accepted(*(torch.where(better[:, None], new, old) for new, old in zip(padded, kept, strict=True)))
        length = torch.where(better, accepted, length)
    return kept
