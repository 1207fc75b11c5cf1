"""Every kernel, compiled for GPUs that are not there: what must hold on each, and the table of what was found."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "benchmarks" / "results" / "gpu").glob("compiled-*.json"))
"""One of each Triton."""

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there"),
]


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_kernels_compile(sm):
    """For tensor cores, within a block's shared memory, with spills only where the table has them, and below 512 B."""
    import triton

    from benchmarks.gpu.compile import Compiled, variants

    kinds = [variant for variant in variants() if sm >= variant.oldest]
    found = {variant.name: Compiled.of(variant, sm) for variant in kinds}
    assert [fault for one in found.values() for fault in one.faults] == []
    results = [json.loads(file.read_text()) for file in RECORDED]
    assert {one["triton"] for one in results} >= {"3.7.1", "3.8.0"}
    for one in results:
        recorded = {row["kernel"]: Compiled(**row) for row in one["kernels"] if row["sm"] == sm}
        assert set(recorded) == set(found)
        assert [row for row in recorded.values() if row.faults] == []
        if triton.__version__ == one["triton"]:
            assert found == recorded


def test_faults_are_seen():
    from benchmarks.gpu.compile import SHARED, Compiled

    good = Compiled("attend", 80, 255, 511, SHARED[80] * 1024, "mma.sync")
    assert good.faults == []
    for bad in ({"spilled": 512}, {"shared": SHARED[80] * 1024 + 1}, {"matrix": "fma"}):
        assert len(good._replace(**bad).faults) == 1


def test_products_without_tensor_cores_are_seen():
    """Of float32 in its own precision: Triton has no other way."""
    import triton
    import triton.language as tl

    from benchmarks.gpu.compile import Compiled, Variant

    @triton.jit
    def multiply(out, a, b, N: tl.constexpr):  # noqa: N803
        at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))

    variant = Variant("multiply", multiply, dict.fromkeys(("out", "a", "b"), "*fp32"), {"N": 32})
    assert any("tensor cores" in fault for fault in Compiled.of(variant, 90).faults)


def test_six_variants_of_attention_serve_a_model():
    """Sizes of query tiles, times own keys in the cache or beside it; nothing else differs between batches."""
    from benchmarks.gpu.compile import variants
    from vllm_adaptive_tree.attention import triton_tree

    mine = [v for v in variants() if v.kernel is triton_tree._attend and v.name.startswith("attend 128 x 4")]
    mine = [v for v in mine if v.types["query"] == v.types["key_cache"] == "*bf16" and v.constants["READ_CONTEXT"]]
    mine = [v for v in mine if not v.constants["WINDOW"]]  # a model's layers have one more for each window
    assert len(mine) == 6
    changing = {name for v in mine for name, value in v.constants.items() if value != mine[0].constants[name]}
    assert changing == {"LANES", "OWN"}
    numbers = {one.name for one in triton_tree._attend.params if not one.is_constexpr and one.do_not_specialize}
    assert numbers == {"offset", "ancestors_row"}


def test_the_compiler_that_is_pinned_has_a_table():
    """Else no figure of it is compared."""
    [pinned] = re.findall(r"^triton==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    assert pinned in [json.loads(file.read_text())["triton"] for file in RECORDED]
