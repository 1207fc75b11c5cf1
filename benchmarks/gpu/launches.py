"""Operations that one decoding step launches on a device, counted without a device.

    python -m benchmarks.gpu.launches --out benchmarks/results/gpu/launches.json

An engine on the CPU with the kernels and the cache of a GPU (`MODEL_RUNNER=v2-kernels`, Triton's interpreter). Counted
are PyTorch's operations, views and empty tensors apart, a kernel as one, and copies between host and device, by the
part of a step that starts them; "inside": what a CUDA graph holds, "outside": what the host starts one by one; "calls":
calls of this package's Python functions from one step's end to the next's, those of the scheduler and comprehensions
too, outside as well, and not those in what counts as one: the host's work without the noise of its time. The models run
without compilation, so their own operations are more than on a GPU; they are inside. Host tensors cannot be told from a
device's here, so the figures are upper bounds. A step is one behind the prompts with a tree of every request, or with
none where the draft rests; of several, the largest.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shutil import copytree
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import vllm_adaptive_tree
from tests import interpreter
from vllm_adaptive_tree.bench.provenance import save

REQUESTS = 2


class Sizes(NamedTuple):
    nodes: int = 64
    depth: int = 8
    tokens: int = 14
    """Of each answer."""
    layers: int | None = None
    """Of the target and of a draft model, with random weights; None: the bundled ones."""


class Case(NamedTuple):
    method: str
    tree: Mapping[str, Any] = MappingProxyType({})
    rule: str = "auto"
    draft: str = "model"
    sampling: Mapping[str, Any] = MappingProxyType({"temperature": 0})
    """Of every request."""


NONE = "no speculation"
RESTING, HEAD, BLOCK = AT_REST = (
    "adaptive_tree at rest",
    "adaptive_tree at rest, EAGLE-3 head",
    "adaptive_tree at rest, DSpark head",
)
SEEDED = {"temperature": 0.8, "seed": 1}
PENALTIES = {"temperature": 0, "repetition_penalty": 1.1}
CASES: dict[str, Case] = {
    NONE: Case(""),
    RESTING: Case("adaptive_tree", {"budget": "auto"}),
    HEAD: Case("adaptive_tree", {"budget": "auto"}, draft="eagle3"),
    BLOCK: Case("adaptive_tree", {"budget": "auto"}, draft="dspark"),
    "adaptive_tree": Case("adaptive_tree", {"max_children": 4}),
    "adaptive_tree, no look-ups": Case("adaptive_tree", {"max_children": 4, "lookup": None}),
    "opt_tree, ngram": Case("opt_tree", draft="ngram"),
    "opt_tree": Case("opt_tree"),
    "opt_tree, penalties": Case("opt_tree", sampling=PENALTIES),
    "dyspec, rrsw": Case("dyspec", {"threshold": 0.02, "max_children": 4}, "rrsw", sampling=SEEDED),
    "dyspec, penalties": Case(
        "dyspec", {"threshold": 0.02, "max_children": 4}, sampling={**PENALTIES, "temperature": 0.8}
    ),
    "static_tree, spechub": Case("static_tree", {"shape": "binary"}, "spechub", sampling=SEEDED),
    "opt_tree, EAGLE-3 head": Case("opt_tree", draft="eagle3"),
    "opt_tree, DSpark head": Case("opt_tree", draft="dspark"),
    "opt_tree, DFlash2 head": Case("opt_tree", draft="dflash2"),
}
IDLE = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "promote_types", "_unsafe_view", "lift_fresh"))
"""Operations that run nothing; so do vLLM's around attention, beside what is in them."""
AROUND = frozenset(("unified_attention_with_output", "unified_kv_cache_update"))
REST = "the rest of a step, vLLM's"
PACKAGE = str(Path(vllm_adaptive_tree.__file__).parent)


class Step(NamedTuple):
    full: bool
    """True if it is of the steps that count."""
    outside: Counter[str]
    inside: Counter[str]
    calls: int


class Count:
    """Of a step, by part."""

    def __init__(self) -> None:
        self.part = [REST]
        self.graph = 0
        """Number of nested graphs that the running code is in; one that replays is a single launch of the host."""
        self.silent = 0
        self.outside, self.inside = Counter[str](), Counter[str]()
        self.calls = 0
        """Calls of this package's functions, those in graphs left out, and the bodies of kernels."""
        self.steps: list[Step] = []
        self.operations: Callable[[], Any] = nullcontext
        """Mode that counts PyTorch's operations."""

    def add(self, number: int = 1) -> None:
        if not self.silent:
            (self.inside if self.graph > 0 else self.outside)[self.part[-1]] += number

    @contextmanager
    def inside_of(self, part: str | None = None, *, graph: int = 0, silent: bool = False) -> Iterator[None]:
        self.part.append(part or self.part[-1])
        if graph > 0 and self.graph == 0:
            self.add()  # the replay
        was, self.graph = self.graph, max(self.graph + graph, 0)
        self.silent += silent
        try:
            yield
        finally:
            self.part.pop()
            self.graph = was
            self.silent -= silent

    def wrap(
        self, owner: Any, name: str, part: str | None = None, *, one: bool = False, hidden: bool = False, **how: Any
    ) -> None:
        """Count what `owner.name` starts as `part`; `one`: as a single launch; `hidden`: it runs in an operation of
        vLLM's, in which modes are off."""
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.inside_of(part, **how):
                if one:
                    self.add()
                with self.inside_of(silent=one), self.operations() if hidden else nullcontext():
                    return original(*args, **kwargs)

        setattr(owner, name, run)

    def called(self, frame: Any, event: str, _: Any) -> None:
        """See `sys.setprofile`."""
        self.calls += (
            event == "call" and not self.silent and self.graph <= 0 and frame.f_code.co_filename.startswith(PACKAGE)
        )

    def end(self, full: bool) -> None:
        self.steps.append(Step(full, self.outside, self.inside, self.calls))
        self.outside, self.inside, self.calls = Counter(), Counter(), 0


def install(count: Count) -> None:
    """Before vLLM is imported."""
    interpreter.install("v2-kernels")
    copies = (("vllm.utils.torch_utils", "async_tensor_h2d"), ("vllm.v1.worker.gpu.async_utils", "async_copy_to_np"))
    for module, name in copies:
        interpreter.after(module, lambda found, name=name: count.wrap(found, name, one=True))
    interpreter.after("vllm.v1.worker.gpu.attn_utils", lambda m: count.wrap(m, "build_attn_metadata", silent=True))
    interpreter.after("triton.runtime.interpreter", lambda m: count.wrap(m.GridExecutor, "__call__", one=True))
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )


def watch(count: Count, runner: Any, nodes: int) -> None:
    """The parts of a step of this engine; `nodes`: of each request in the steps that count."""
    parts: list[tuple[Any, str, str]] = [
        (runner, "prepare_inputs", "prepare_inputs, vLLM's"),
        (runner, "prepare_attn", "slots of the rows, vLLM's"),
        (runner.model_state, "prepare_attn", "metadata"),
        (runner, "sample", "logits and samples, vLLM's"),
        (runner, "postprocess_sampled", "postprocess_sampled, vLLM's"),
    ]
    for owner, name, part in parts:
        count.wrap(owner, name, part)
    count.wrap(runner.model, "forward", "target forward", graph=1)
    draft_layers = frozenset[str]()
    if runner.speculator is not None:
        watch_trees(count, runner)
        draft_layers = runner.speculator.draft_attn_layer_names
    for name, layer in runner.compilation_config.static_forward_context.items():
        attention = f"attention of the {'draft' if name in draft_layers else 'target'}'s layers"
        count.wrap(layer.impl, "forward", attention, hidden=True)
        count.wrap(layer.impl, "do_kv_cache_update", attention, one=True)
    original = runner.sample_tokens

    def sample_tokens(*args: Any) -> Any:
        found = original(*args)
        count.end(bool(verified) and verified[-1])
        return found

    verified: list[bool] = []
    prepare = runner.prepare_attn

    def prepare_attn(batch: Any) -> Any:
        prepared = prepare(batch)
        drafts = batch.num_draft_tokens_per_req
        verified.append(not batch.has_prefill and bool(np.all((0 if drafts is None else drafts) == nodes)))
        return prepared

    runner.sample_tokens, runner.prepare_attn = sample_tokens, prepare_attn


def watch_trees(count: Count, runner: Any) -> None:
    """The parts of a step with trees."""
    from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
    from vllm_adaptive_tree.engine.v2.verification import Verification

    speculator = runner.speculator
    parts: list[tuple[Any, str, str]] = [
        (Verification, "laid_out", "rows of the trees"),
        (runner.step, "accept", "acceptance"),
        (runner.attention.buffers, "commit", "commit"),
        (speculator, "propose", "the rest of propose"),
        (speculator, "prepare", "what the draft starts from"),
        (speculator, "read", "catch-up of the draft"),
        (speculator, "grown_trees", "trees of the draft"),
    ]
    if hasattr(speculator, "lattice"):
        parts += [(speculator.lattice, name, "scores of a head of one forward") for name in ("begin", "grow")]
        if runner.budget is None:  # where it rests nothing of it is in a graph
            for name in ("_precompute_context_kv", "_generate_draft"):  # one graph of vLLM's, counted as two
                count.wrap(speculator.block, name, "block of a head of one forward", graph=1)
    if runner.adaptive_verification is not None:
        parts.append((runner.adaptive_verification, "reallocate_drafts", "budget: nodes of each request"))
    if runner.budget is not None:
        parts += [(runner.budget, name, "budget: figures") for name in ("verified", "drafted", "fit")]
    for owner, name, part in parts:
        count.wrap(owner, name, part)
    Verification.laid_out = staticmethod(Verification.laid_out)  # type: ignore[method-assign]
    count.wrap(AsyncReadback, "send", one=True)
    graphs, pieces = speculator.graphs, speculator.pieces()
    run = graphs.run

    def recorded(piece: Any, function: Callable[[], Any]) -> Any:
        with count.inside_of(graph=int(piece in pieces)):
            return run(piece, function)

    graphs.run = recorded


def measured(count: Count, case: str, sizes: Sizes) -> dict[str, Any]:
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm import LLM, SamplingParams

    from tests.engine import heads
    from tests.engine.engines import DRAFT, PROMPTS, TARGET, runner_of
    from vllm_adaptive_tree.budget.fixed import Budget, Plan

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            count.add(not (func.is_view or func._opname in IDLE | AROUND))
            return func(*args, **(kwargs or {}))

    method, tree, rule, draft, sampling = CASES[case]
    depth = {} if method == "static_tree" else {"max_depth": sizes.depth}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        llm = LLM(
            TARGET if sizes.layers is None else _of_layers(TARGET, models / "target", sizes.layers),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            block_size=32,
            max_num_seqs=REQUESTS,
            num_gpu_blocks_override=64,
            load_format="auto" if sizes.layers is None else "dummy",
            speculative_config=None
            if case == NONE
            else {
                "method": method,
                "model": (
                    draft
                    if draft == "ngram"
                    else getattr(heads, draft)(models / "head")
                    if draft != "model"
                    else DRAFT
                    if sizes.layers is None
                    else _of_layers(DRAFT, models / "draft", sizes.layers)
                ),
                "num_speculative_tokens": sizes.nodes,
                "rejection_sample_method": rule,
                "tree": {"draft": draft, **depth, "budget": None, **tree},
            },
        )
        runner = runner_of(llm)
        if case in AT_REST:
            runner.budget.budget = Budget(sampled=True)
            runner.budget.budget.plan = Plan(0, 0.0, most=0)
        watch(count, runner, 0 if case in (NONE, *AT_REST) else sizes.nodes)
        count.steps.clear()
        params = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True, **sampling)
        count.operations = Operations
        with Operations():
            sys.setprofile(count.called)
            llm.generate(PROMPTS[:REQUESTS], params, use_tqdm=False)
            sys.setprofile(None)
        _, outside, inside, calls = max(
            (step for step in count.steps if step.full), key=lambda one: one.outside.total()
        )
        layer_count = llm.llm_engine.model_config.hf_config.num_hidden_layers
        llm.llm_engine.engine_core.shutdown()
    return {
        "case": case,
        "layers": layer_count,
        "outside": dict(outside.most_common()),
        "inside": dict(inside.most_common()),
        "outside_total": outside.total(),
        "inside_total": inside.total(),
        "calls": calls,
    }


def _of_layers(model: str, folder: Path, layers: int) -> str:
    """The folder of a model with so many layers."""
    copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return str(folder)


def table(rows: list[dict[str, Any]]) -> str:
    parts = sorted({part for row in rows for part in row["outside"] | row["inside"]})
    lines = ["| part | " + " | ".join(row["case"] for row in rows) + " |", "| --- |" + " --- |" * len(rows)]
    for part in parts:
        cells = []
        for row in rows:
            outside, inside = row["outside"].get(part, 0), row["inside"].get(part, 0)
            cells.append(f"{outside:,}" + (f" (+ {inside:,} inside)" if inside else ""))
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    totals = [f"{row['outside_total']:,} (+ {row['inside_total']:,} inside)" for row in rows]
    lines.append("| **in all** | " + " | ".join(totals) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu/launches.json"))
    parser.add_argument("--name", default="now", help="of these figures in the file, which keeps others")
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    count, sizes = Count(), Sizes()
    install(count)
    rows = [measured(count, case, sizes) for case in options.case or CASES]
    print(table(rows))
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    results[options.name] = {"nodes": sizes.nodes, "levels": sizes.depth, "requests": REQUESTS, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
