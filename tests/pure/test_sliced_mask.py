"""The mask of a shape, built once: its leading squares are the masks of the tree cut behind each level."""

import itertools

import pytest
import torch

from tests.oracles.growth import Recorder, as_the_engine, grow, models_of
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.trees import Shape, SlicedMask

SHAPES = {
    "fork": Shape.k_config((3, 1, 1, 1)),
    "k-config": Shape.k_config((4, 2, 2, 1)),
    "chain": Shape.k_config((1, 1, 1)),
    "eagle1": Shape.named("eagle1", 25),
    "cut": Shape.k_config((3, 2, 2)).cut(11),
    "one level": Shape.k_config((5,)),
}


def from_scratch(shape: Shape, level: int) -> torch.Tensor:
    """Walk up from every node that has children, down to `level`."""
    inner = [path for path in ((), *shape.paths) if shape.num_children(path) and len(path) <= level]
    mask = torch.zeros(len(inner), len(inner), dtype=torch.bool)
    for row, path in enumerate(inner):
        for length in range(len(path) + 1):
            mask[row, inner.index(path[:length])] = True
    return mask


@pytest.mark.parametrize("name", SHAPES)
def test_a_slice_is_the_mask_built_from_scratch(name):
    shape = SHAPES[name]
    mask = SlicedMask.cached(shape)
    for level in range(shape.depth):
        assert torch.equal(mask.upto(level), from_scratch(shape, level))
    assert len(mask.whole) == mask.ends[-1]


def test_the_fork_of_three_sequences():
    """Nine rows behind the root, sliced at 3 and 6: a row sees its own sequence (the paper's example)."""
    mask = SlicedMask(Shape.k_config((3, 1, 1, 1)))
    assert mask.ends == [1, 4, 7, 10]
    own = torch.eye(3, dtype=torch.bool).repeat(3, 3).tril()
    assert torch.equal(mask.whole[1:, 1:], own & (torch.arange(9)[:, None] // 3 >= torch.arange(9) // 3))
    assert mask.whole[:, 0].all()


def test_it_grows_with_the_depth_of_a_fork_and_not_with_its_leaves():
    forks, trees = (
        [len(SlicedMask(Shape.k_config(widths(depth))).whole) for depth in range(2, 6)]
        for widths in (lambda depth: (4,) + (1,) * depth, lambda depth: (2,) * depth)
    )
    assert [b - a for a, b in itertools.pairwise(forks)] == [4, 4, 4]
    assert [b - a for a, b in itertools.pairwise(trees)] == [4, 8, 16]


@pytest.mark.parametrize("name", ["fork", "k-config", "eagle1"])
def test_its_rows_are_what_the_draft_reads(name):
    """Slot by slot: an ancestor's history is a prefix."""
    shape, models = SHAPES[name], models_of(5, 4, 2)
    recorder = Recorder(models)
    grow(Mcsd(shape), models, nodes=len(shape), drafter=recorder, agree=as_the_engine)
    histories = torch.cat(recorder.histories, 1)
    mask = SlicedMask(shape)
    assert [h.shape[1] for h in recorder.histories] == [b - a for a, b in zip([0, *mask.ends], mask.ends, strict=False)]

    def ancestors(history: int) -> list[int]:
        return [history, *(ancestors((history - 1) // 5) if history else [])]

    for row in histories.tolist():
        seen = [[other in ancestors(history) for other in row] for history in row]
        assert seen == mask.whole.tolist()
