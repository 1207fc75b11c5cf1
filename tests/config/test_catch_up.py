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
    batch = SimpleNamespace(token_ids_cpu=np.arange(20).reshape(2, 10), req_ids=["hit", "other"])
    runner: Any = SimpleNamespace(drafter=SimpleNamespace(block_table=table), input_batch=batch, loaded={})
    hit, other = CatchUp(0, BLOCK, [4], BLOCK), CatchUp(1, 0, [10, 11, 12, 13], None)
    read = without_gaps(runner, coverage, [hit, other], 100, True)
    assert read == [CatchUp(0, 0, [0, 1, 2, 3, 4], BLOCK), other]
    assert without_gaps(runner, coverage, [hit._replace(start=BLOCK + 1)], 100, False) == []


def test_what_a_connector_has_brought_is_read() -> None:
    """Its blocks had been read with another text."""
    coverage = Coverage(4, BLOCK)
    coverage.renew(slice(None))
    table = SimpleNamespace(block_table=SimpleNamespace(np=np.array([[1, 2, 3]])))
    batch = SimpleNamespace(token_ids_cpu=np.arange(20).reshape(1, 20), req_ids=["one"])
    loaded = {"one": BLOCK}
    runner: Any = SimpleNamespace(drafter=SimpleNamespace(block_table=table), input_batch=batch, loaded=loaded)
    item = CatchUp(0, 2 * BLOCK, [2 * BLOCK], 2 * BLOCK)
    assert without_gaps(runner, coverage, [item], 100, True) == [
        CatchUp(0, BLOCK, list(range(BLOCK, 2 * BLOCK + 1)), 2 * BLOCK)
    ]
