"""What a draft model reads after steps that it has skipped."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, without_gaps

BLOCK = 4


def test_a_prefix_hit_on_what_another_fills_in_the_same_step() -> None:
    """A block had been read for the request that had it before; whoever comes first in the batch reads it anew."""
    coverage = Coverage(4, BLOCK)
    coverage.renew(slice(None))
    table = SimpleNamespace(block_table=SimpleNamespace(np=np.array([[1, 2], [1, 3]])))
    tokens = SimpleNamespace(token_ids_cpu=np.arange(20).reshape(2, 10))
    runner: Any = SimpleNamespace(drafter=SimpleNamespace(block_table=table), input_batch=tokens)
    hit, other = CatchUp(0, BLOCK, [4], BLOCK), CatchUp(1, 0, [10, 11, 12, 13], None)
    read = without_gaps(runner, coverage, [hit, other], 100, True)
    assert read == [CatchUp(0, 0, [0, 1, 2, 3, 4], BLOCK), other]
    assert without_gaps(runner, coverage, [hit._replace(start=BLOCK + 1)], 100, False) == []
