"""Every kernel compiled for GPUs that are not there: registers, spills, shared memory, kind of matrix instruction.

    python -m benchmarks.gpu.compile    # writes benchmarks/results/gpu/compiled-VERSION.json, of the Triton installed

No GPU and no CUDA are needed: Triton brings its own assembler. A kernel that does not compile, multiplies matrices
without tensor cores, asks for more shared memory than a block may have, or spills 512 bytes a thread or more is an
error, and the command ends with code 1. `--markdown` prints what is recorded as a table.
"""

# mypy: disable-error-code="import-untyped"

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_adaptive_tree.attention import plan, triton_tree
from vllm_adaptive_tree.attention.plan import LANES, MOST_SPLITS, Tiling
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.drafters.ngram import LENGTH, MATCHES, NOTHING
from vllm_adaptive_tree.kernels import (
    accepted,
    commit,
    growth,
    layout,
    merging,
    ngram,
    paths,
    reading,
    rules,
    sampling,
    selection,
    shape,
    slots,
    waiting,
)
from vllm_adaptive_tree.proposers.acceptance_table import EDGES, LEAST, MOST, RANKS, SHAPE, WARM
from vllm_adaptive_tree.proposers.adaptive_tree import LEAST_LEFT, SPREAD
from vllm_adaptive_tree.proposers.merging import GOES_ON
from vllm_adaptive_tree.trees.masks import WORD
from vllm_adaptive_tree.trees.tree_batch import EMPTY
from vllm_adaptive_tree.vocab_ops import CHUNK

ARCHITECTURES = (80, 90, 100)
SHARED = {80: 163, 90: 227, 100: 227}
"""Compute capability -> KiB of shared memory that a block may have."""
MOST_SPILLED = 512
INSTRUCTIONS = {"tcgen05.mma": "tcgen05", "wgmma.mma": "wgmma", "mma.sync": "mma.sync"}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OUT = Path(f"benchmarks/results/gpu/compiled-{triton.__version__}.json")


class Variant(NamedTuple):
    """A kernel as a launch specialises it."""

    name: str
    kernel: Any
    types: dict[str, str]  # argument -> type, all others are i32
    constants: dict[str, Any]
    warps: int = 4
    aligned: tuple[str, ...] = ()
    """Numbers that are divisible by 16; pointers are."""
    oldest: int = 80
    """No older GPU has the types."""

    def source(self) -> Any:
        names = self.kernel.arg_names
        signature = {name: self.types.get(name, "i32") for name in names} | dict.fromkeys(self.constants, "constexpr")
        loose = {one.name for one in self.kernel.params if one.do_not_specialize or one.do_not_specialize_on_alignment}
        aligned = ({name for name, kind in signature.items() if kind[0] == "*"} | set(self.aligned)) - loose
        places = {(names.index(name),): value for name, value in self.constants.items()}
        return ASTSource(
            self.kernel, signature, places, {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        )


class Compiled(NamedTuple):
    """A variant for one architecture."""

    kernel: str
    sm: int
    registers: int  # a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a block
    matrix: str | None  # instruction; "fma": none of the tensor cores'

    @classmethod
    def of(cls, variant: Variant, sm: int) -> "Compiled":
        """Down to machine code."""
        options = {"num_warps": variant.warps, "num_stages": 3}
        found = triton.compile(variant.source(), target=GPUTarget("cuda", sm, 32), options=options)
        matrix = next((kind for text, kind in INSTRUCTIONS.items() if text in found.asm["ptx"]), "fma")
        dots = "tt.dot" in found.asm["ttir"]
        return cls(variant.name, sm, *_resources(found.asm["cubin"]), found.metadata.shared, matrix if dots else None)

    @property
    def faults(self) -> list[str]:
        found = {
            f"{self.shared} bytes of shared memory": self.shared > SHARED[self.sm] * 1024,
            f"{self.spilled} bytes spilled": self.spilled >= MOST_SPILLED,
            "no tensor cores": self.matrix == "fma",
        }
        return [f"{self.kernel} on sm_{self.sm}: {text}" for text, true in found.items() if true]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of a thread's stack, on which nothing lies but what is spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[-1]
    return int(registers), int(stack)


def variants() -> Iterator[Variant]:
    """All that an engine starts; first what a Llama-3 8B in bfloat16 does."""
    for lanes in LANES:
        yield _attend(128, 4, lanes)
        yield _attend(128, 4, lanes, own=True)
    yield from (
        _merge(128, 4),
        _plan(256),
        _move(),
        _bits(64),
        _path(64),
        _read(256),
        *_growth(64, 16),
        *_selection(256, 64),
    )
    yield from _small(128_256, 16, 64)
    for lanes in LANES:
        yield _attend(64, 8, lanes, own=True)
    yield _attend(64, 8, 128)
    for group in (1, 8):
        yield _attend(128, group, 128)
    yield _attend(96, 7, 128)
    yield _attend(128, 4, 128, dtype="fp16")
    yield _attend(128, 4, 128, context=False)
    yield _attend(128, 4, 128, window=4096)
    yield _attend(256, 2, 64, window=4096, soft_cap=True)  # Gemma 2
    yield _attend(64, 8, 128, window=128, sinks=True)  # gpt-oss
    for own in (False, True):
        for group, lanes in ((16, 32), (16, 16), (8, 32)):
            yield _attend(512, group, lanes, own=own, extra=64)  # DeepSeek
        for lanes in (16, 64):
            yield _attend(256, 4, lanes, own=own)
        for wide_queries, scale_head in ((False, False), (False, True), (True, True)):
            yield _attend(128, 4, 128, own=own, cache="fp8e4nv", wide_queries=wide_queries, scale_head=scale_head)
        yield _attend(256, 4, 16, own=own, cache="fp8e4nv")
        for head_size, lanes in ((64, 64), (128, 32), (256, 16)):
            yield _attend(head_size, 4, lanes, own=own, dtype="fp32")
    yield from (
        _merge(256, 4),
        _plan(1024),
        _bits(255),
        _path(255),
        _read(1024),
        *_growth(255, 16),
        *_small(32_000, 4, 255),
        *_small(262_144, 64, 64),
    )


def _attend(
    head_size: int, group: int, lanes: int, *, own: bool = False, context: bool = True, dtype: str = "bf16",
    cache: str | None = None, wide_queries: bool = False, scale_head: bool = False,
    window: int = 0, soft_cap: bool = False, sinks: bool = False, extra: int = 0,
) -> Variant:  # fmt: skip
    tiling = Tiling.of(group, head_size, TYPES[dtype].itemsize, max(lanes // group, 1))
    assert tiling.lanes == lanes
    kernel = triton_tree._attend
    types = dict.fromkeys(("out", "context_out", "own_key", "own_value", "sinks"), f"*{dtype}")
    types |= dict.fromkeys(("key_cache", "value_cache"), f"*{cache or dtype}")
    types["query"] = f"*{dtype if wide_queries else cache or dtype}"
    scales = "query_scale", "key_scale", "value_scale"
    types |= dict.fromkeys(("partial", "weight", "context_log", *scales), "*fp32")
    types |= dict.fromkeys(("block_table", "row_start", "context", "work", "items", "merges"), "*i32")
    types |= dict.fromkeys(("scale", "soft_cap"), "fp32") | {"ancestors": "*i64"}
    shapes = {"KV_HEADS": 8, "GROUP": group, "HEAD_SIZE": head_size, "PADDED_HEAD": triton.next_power_of_2(head_size)}
    sizes = {"BLOCK_SIZE": 16, "LANES": lanes, "TILE": tiling.tile, "WORD": WORD, "EXTRA": extra}
    kinds = {"WINDOW": window, "SOFT_CAP": soft_cap, "SINKS": sinks}
    kinds |= {"QUERY_8_BITS": bool(cache) and not wide_queries, "CACHE_8_BITS": bool(cache)}
    kinds["SCALE_HEAD"] = int(scale_head)
    kinds |= {"OWN": own, "READ_CONTEXT": context, "LOG2_E": triton_tree.LOG2_E, "WIDEN": False}
    strides = ("_row", "_head", "_block", "_slot", "_request")
    aligned = tuple(name for name in kernel.arg_names if name.endswith(strides) and name != "context_log_head")
    notes = (dtype, f"{cache} cache" if cache else "", "own keys" if own else "", "" if context else "no context")
    notes += f"{dtype} queries" if wide_queries else "", "scales per head" if scale_head else ""
    notes += (f"latents and {extra}" if extra else "",)
    notes += f"window {window}" if window else "", "soft-cap" if soft_cap else "", "sinks" if sinks else ""
    name = f"attend {head_size} x {group}, {lanes} lanes, {', '.join(note for note in notes if note)}"
    return Variant(name, kernel, types, shapes | sizes | kinds, tiling.warps, aligned, 90 if cache else 80)


def _merge(head_size: int, group: int) -> Variant:
    types = {"out": "*bf16", "partial": "*fp32", "weight": "*fp32", "merges": "*i32"}
    sizes = {"HEAD_SIZE": head_size, "PADDED_HEAD": triton.next_power_of_2(head_size), "SPLITS": 8}
    constants = {"KV_HEADS": 8, "GROUP": group, "LANES": 64, **sizes}
    return Variant(f"merge {head_size}", triton_tree._merge, types, constants, aligned=("out_row", "out_head"))


def _plan(requests: int) -> Variant:
    types = dict.fromkeys(("work", "items", "merges", "row_start", "context"), "*i32")
    constants = {"TILE_ROWS": 32, "TILE": 64, "MOST_SPLITS": MOST_SPLITS, "PADDED_REQUESTS": requests, "BLOCK": 128}
    return Variant(f"plan, {requests} requests", plan._plan, types, constants)


def _move() -> Variant:
    types = {"caches": "*i64", "block_table": "*i32", "root": "*i64", "nodes": "*i64"}
    constants = {"BLOCK_SIZE": 16, "WIDTH": 64, "PADDED_WIDTH": 64, "PADDED_LEVELS": 16}
    return Variant("move", commit._move, types, constants, aligned=("cache_block", "cache_head", "cache_slot"))


def _path(nodes: int) -> Variant:
    types = dict.fromkeys(("rows", "positions", "first", "root", "drafted", "tokens", "accepted"), "*i64")
    constants = {"EMPTY": EMPTY, "PADDED": triton.next_power_of_2(nodes)}
    return Variant(f"path, {nodes} nodes", accepted._path, types | {"input_ids": "*i32"}, constants, 1)


def _bits(nodes: int) -> Variant:
    kernel, words = layout._bits, -(-(1 + nodes) // WORD)
    types = {name: "*i64" for name in kernel.arg_names if name.islower() and name != "plain"}
    types |= dict.fromkeys(("context_out", "input_ids", "request", "logits_start", "row_start"), "*i32")
    types |= dict.fromkeys(("weight", "weight_out"), "*fp32")
    sizes = {"PADDED": triton.next_power_of_2(1 + nodes), "WORDS": words, "PADDED_WORDS": triton.next_power_of_2(words)}
    return Variant(f"bits, {nodes} nodes", kernel, types, {"NODES": nodes, "WORD": WORD, "EMPTY": -1, **sizes})


def _read(requests: int) -> Variant:
    kernel = reading._read
    scalars = ("requests", "limit", "nobody", "rows", "certain", "random", "threshold", "floor", "shift")
    strides = ("text_row", "nodes_row", "table_row")
    types = {name: "*i64" for name in kernel.arg_names if name.islower() and name not in (*scalars, *strides)}
    types |= dict.fromkeys(("certain", "random", "threshold", "floor"), "fp32")
    small = ("tokens_out", "start_out", "context_out", "num_sampled", "row_start", "computed", "text", "table")
    types |= dict.fromkeys(small, "*i32")
    types |= dict.fromkeys(("alive_out", "greedy_out", "ready"), "*i8")
    types |= dict.fromkeys(("temperature_out", "temperature"), "*fp32") | {"limits_out": "*fp64"}
    sizes = {"WIDTH": 10, "PADDED_WIDTH": 16, "PADDED_REQUESTS": requests, "PADDED_WORDS": 1, "WORDS": 1}
    constants = {"FOLLOWS": True, "READS": True, "WORD": WORD, "BLOCK_SIZE": 16, "PAD_SLOT": -1, "BLOCK": 128, **sizes}
    return Variant(f"read, {requests} requests", kernel, types, constants)


def _growth(nodes: int, children: int) -> Iterator[Variant]:
    """A level of `adaptive_tree`, one of `opt_tree`, and one of `dyspec`."""
    places = dict.fromkeys(("cell_out", "column_out", "tokens", "best_token", "ranks"), "*i64")
    places |= dict.fromkeys(("value_out", "path_out", "q", "best_share", "path", "above", "temperature"), "*fp32")
    places |= dict.fromkeys(("table", "edges", "centres", "warm"), "*fp32") | dict.fromkeys(("greedy", "chosen"), "*i1")
    sizes = {"EDGES": len(EDGES), "WARM": len(WARM), "RANKS": len(RANKS), "DEPTHS": SHAPE[1], "RANK_GROUPS": SHAPE[2]}
    bounds = {"SPREAD": SPREAD, "LEAST_LEFT": LEAST_LEFT, "LEAST": LEAST, "MOST": MOST, "PADDED": children}
    yield Variant(f"slots of {children}", slots._slots, places, sizes | bounds, 1, ("vocabulary",))
    types = places | {"least": "*fp64"}
    name = f"slots of {children} by the draft"
    yield Variant(name, slots._draft_slots, types, {"PADDED": children}, 1, ("vocabulary",))
    padded = triton.next_power_of_2(nodes)
    types = {"slot_out": "*i64", "expand": "*i1", "dead": "*i1"}
    yield Variant(f"slots read, {nodes}", growth._slots_read, types, {"PADDED": padded}, 1)
    types = dict.fromkeys(("tokens_out", "parent_out", "cell_out", "front_tokens_out", "front_parent_out"), "*i64")
    types |= dict.fromkeys(("tokens", "column", "cell"), "*i64") | {"expand_out": "*i1"}
    types |= dict.fromkeys(("value_out", "path_out", "front_value_out", "front_path_out", "best_out"), "*fp32")
    types |= dict.fromkeys(("total_out", "value", "path", "best", "total"), "*fp32")
    types |= dict.fromkeys(("threshold", "floor"), "*fp64")
    most = nodes * children
    for count, cells, limited in ((most, True, True), (nodes, False, True), (most, False, False)):
        size = triton.next_power_of_2(count)
        constants = {"CELLS": cells, "LIMITED": limited, "EMPTY": EMPTY, "PADDED": size, "PADDED_NODES": padded}
        constants["BLOCK"] = growth.rivals_at_a_time(size)
        of = types if limited else types | dict.fromkeys(("threshold", "floor"), "*fp32")
        name = f"keep {nodes} of {count}" + ("" if limited else ", no limits")
        yield Variant(name, growth._keep, of, constants, 4 if count <= 1024 else 8)


def _selection(requests: int, nodes: int) -> Iterator[Variant]:
    """What is verified, and what waits where nothing is."""
    padded = triton.next_power_of_2(nodes)
    types = {"value_out": "*fp32", "weight": "*fp32", "place": "*i64", "request": "*i64", "capacity": "*i32"}
    constants = {"BY_PLACE": False, "LEAST": selection.LEAST, "PADDED": padded}
    yield Variant(f"falling, {nodes} nodes", selection._falling, types, constants, 1)
    types = {"kept_out": "*i32", "value": "*fp32"}
    yield Variant(f"kept, {nodes} nodes", selection._kept, types, {"BLOCK": selection.BLOCK, "PADDED": padded})
    types = dict.fromkeys(("start", "request", "row"), "*i64") | {"end": "*i32", "count": "*i32", "fresh": "*i1"}
    types |= {"kept": "*bf16", "states": "*bf16"}
    yield Variant("wait", waiting._wait, types, {"BLOCK": waiting.BLOCK}, aligned=("size",))
    types = dict.fromkeys(("logits_out", "rows_out", "kept", "others"), "*i32")
    yield Variant(f"starts, {requests} requests", selection._starts, types, {"PADDED": 2 * requests})


def _small(vocabulary: int, children: int, nodes: int) -> Iterator[Variant]:
    """Draws and rules."""
    chunks = triton.next_power_of_2(-(-vocabulary // CHUNK))
    sizes = {"CHUNK": CHUNK, "PADDED_CHUNKS": chunks, "PADDED_K": children}
    types = {"tokens": "*i64", "probs": "*fp32", "sums": "*fp64", "key": "*i64"}
    constants = {**sizes, "EXHAUSTED": sampling.EXHAUSTED, "BELOW_ONE": sampling.BELOW_ONE}
    name = f"sample {children} of {vocabulary}"
    yield Variant(name, sampling._sample, types, constants, 4 if chunks <= 1024 else 8, ("vocabulary",))
    types = {"tokens": "*i64", "best_token": "*i64", "chosen": "*i1"}
    types |= dict.fromkeys(("best_share", "probs", "maxima"), "*fp32")
    name = f"top {children} of {vocabulary}"
    constants = {**sizes, "POSSIBLE": True}
    yield Variant(name, sampling._top, types, constants, 4 if chunks <= 1024 else 8, ("vocabulary",))
    if vocabulary != 128_256:
        return
    pointers = dict.fromkeys(("bound", "base", "key"), "*i64")
    yield Variant("fold_in", sampling._fold_in, pointers, {"BLOCK": sampling.FOLD_IN_BLOCK})
    pointers = dict.fromkeys(("key", "seed", "position"), "*i64")
    yield Variant("begin", sampling._begin, pointers, {"BLOCK": sampling.FOLD_IN_BLOCK})
    pointers = dict.fromkeys(("tokens_out", "nodes_out", "sampled", "root_row", "tokens", "parent"), "*i64")
    modules = ("walk", "traversal", "rejection_walk")
    walk, traversal, rejection_walk = (sys.modules[f"vllm_adaptive_tree.kernels.{name}"] for name in modules)
    padded = triton.next_power_of_2(nodes)
    yield Variant(f"walk, {nodes} nodes", walk._walk, pointers, {"STEPS": 9, "PADDED_NODES": padded}, 1)
    types = dict.fromkeys(("tokens", "best", "count", "key"), "*i64") | {"probs": "*fp32", "sums": "*fp64"}
    constants = {"CHUNK": CHUNK, "PADDED_CHUNKS": chunks, "PADDED_K": 2, "BELOW_ONE": sampling.BELOW_ONE}
    yield Variant("sample another", sampling._sample_other, types, constants, 8, ("vocabulary",))
    yield from _look_ups(nodes)
    types = dict.fromkeys(("tokens", "read", "drawn", "inner", "children", "column", "rank"), "*i64")
    types |= {"path": "*fp32", "q": "*fp32"} | dict.fromkeys(("exists_out", "dead", "going"), "*i1")
    constants = {"FIRST": False, "EMPTY": EMPTY, "PADDED": 32}
    yield Variant("place 32 children", shape._place, types, constants, 1, ("vocabulary",))
    outs = dict.fromkeys(("tokens_out", "place_out", "tokens", "start"), "*i32")
    outs |= dict.fromkeys(("request_out", "index"), "*i64")
    windows = {"ALL": True, "PADDED": triton.next_power_of_2(nodes + 1)}
    yield Variant(f"windows, {nodes} nodes", paths._windows, outs | {"parent": "*i64", "node": "*i64"}, windows, 1)
    rounding = {"TINY": torch.finfo(torch.float32).tiny, "ROUNDING": 1e-6, "BLOCK": rules.BLOCK}
    for rule in rules.REJECTION_RULES.values():
        constants = {**rounding, "RULE": rule}
        pointers = dict.fromkeys(("accepted", "children", "planned", "key"), "*i64") | {"p": "*fp32", "q": "*fp32"}
        yield Variant(f"test, {rule}", rules._test, pointers, constants | {"PADDED": 4}, 16, ("vocabulary",))
        path = ("tokens_out", "nodes_out", "tokens", "parent", "root_row", "place", "slot", "planned", "key")
        places = {**dict.fromkeys(path, "*i64"), "draft": "*bf16", "selected": "*i8", "sums": "*fp64"}
        places |= dict.fromkeys(("p", "q", "target", "temperature"), "*fp32")
        steps = {"STEPS": 9, "PADDED_STEPS": 16, "PADDED_NODES": padded, "TYPE": tl.float32}
        draw = {"CHUNK": CHUNK, "PADDED_CHUNKS": chunks, "BELOW_ONE": sampling.BELOW_ONE}
        name = f"reject, {nodes} nodes, {rule}"
        yield Variant(name, rejection_walk._reject, places, constants | steps | draw, 16, ("vocabulary",))
    levels = {"LEVELS": 8, "PADDED_LEVELS": 16, "PADDED_NODES": padded, "TYPE": tl.float32}
    pointers = dict.fromkeys(("probs_out", "p_left", "q_left", "target", "temperature"), "*fp32")
    pointers |= dict.fromkeys(("path_out", "end_out", "tokens", "parent", "root_row", "draft_row", "key"), "*i64")
    pointers |= {"draft": "*bf16", "chosen": "*i8", "selected": "*i8"}
    for replaced, mixed in ((False, False), (False, True), (True, False)):
        note = ("replaced" if replaced else "not replaced") + ", some chosen" * mixed
        constants = {**rounding, **levels, "REPLACED": replaced, "MIXED": mixed}
        name = f"traverse, {nodes} nodes, {note}"
        yield Variant(name, traversal._traverse, pointers, constants, 16, ("vocabulary",))


def _look_ups(nodes: int) -> Iterator[Variant]:
    types = {"tokens_out": "*i64", "weight_out": "*fp32", "index": "*i64"} | dict.fromkeys(("text", "length"), "*i32")
    constants = {"COMMON": ngram.COMMON, "MATCHES": MATCHES, "LENGTH": LENGTH, "LOG_LONGER": 1.0, "NOTHING": NOTHING}
    yield Variant("look up", ngram._look_up, types, constants | {"BLOCK": ngram.BLOCK}, ngram.WARPS, ("row",))
    columns = "tokens", "parent", "depth", "read", "cell", "planned"
    types = dict.fromkeys((*columns, *(f"{name}_out" for name in columns), "level_out", "chains"), "*i64")
    types |= {"chosen_out": "*i1", "own_draws": "*i8", "integers": "*i32"}
    types |= dict.fromkeys(("value_out", "numbers", "value", "weight"), "*fp32")
    for size in (0, nodes):
        padded = triton.next_power_of_2(size + MATCHES * LENGTH)
        constants = {"CHAINS": MATCHES, "PADDED_CHAINS": MATCHES, "LENGTH": LENGTH, "PADDED_LENGTH": LENGTH}
        constants |= {"PADDED_SIZE": max(1, size), "PADDED": padded, "ROUNDS": 5, "TEXT_ROUNDS": 4}
        constants |= {"LOG_GOES_ON": math.log(GOES_ON), "DRAFTED": size > 0, "LIMITED": True, "CELLS": size > 0}
        constants |= {"MIXES": True, "BLOCK": growth.rivals_at_a_time(padded), "EMPTY": EMPTY}
        yield Variant(f"merge into {size} nodes", merging._merge, types, constants)


def table(rows: list[Compiled]) -> str:
    """Markdown: a line for each kernel, a column for each architecture."""
    lines = [
        "| kernel | " + " | ".join(f"sm_{sm}" for sm in ARCHITECTURES) + " |",
        "| --- |" + " --- |" * len(ARCHITECTURES),
    ]
    for name in dict.fromkeys(row.kernel for row in rows):
        cells = {row.sm: _cell(row) for row in rows if row.kernel == name}
        lines.append(f"| {name} | " + " | ".join(cells.get(sm, "") for sm in ARCHITECTURES) + " |")
    return "\n".join(lines)


def _cell(row: Compiled) -> str:
    parts = [row.matrix, f"{row.registers}", f"{row.spilled}", f"{row.shared / 1024:.0f}"]
    return ", ".join(part for part in parts if part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--markdown", action="store_true", help="compile nothing: print the table of what --out holds")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(table([Compiled(**row) for row in json.loads(arguments.out.read_text())["kernels"]]))
        return 0
    rows = []
    for variant in variants():
        for sm in ARCHITECTURES:
            if sm >= variant.oldest:
                rows.append(Compiled.of(variant, sm))
                print(*rows[-1], flush=True)
    results = {"triton": triton.__version__, "kernels": [row._asdict() for row in rows]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save(arguments.out, results)
    faults = [fault for row in rows for fault in row.faults]
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
