import gc
import importlib
import os
from pathlib import Path
from typing import Any

import vllm_adaptive_tree
from vllm_adaptive_tree.proposers import METHODS
from vllm_adaptive_tree.trees import TokenTree

CACHE = 256 << 20  # bytes
V2 = os.environ.get("MODEL_RUNNER", "v1") != "v1"

PAIR = Path(vllm_adaptive_tree.__file__).parent / "demo_pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")

PROMPTS = [
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file',
    "class Counter(dict):\n    '''Dict subclass for counting",
    "The with statement\n******************\n\nThe with statement is used to wrap",
    "import os\nimport sys\n",
    "    def __init__(self, name, value=None):\n        self.name = name\n",
    "Comparisons\n***********\n\nUnlike C, all comparison operations in Python have the same priority",
    "try:\n    from _collections import deque\nexcept ImportError:\n",
    "def test(verbose=False):\n    for i in range(10):\n        print(",
    "An object is immutable if",
    "    if not isinstance(other, type(self)):\n        return NotImplemented\n",
    "# This module implements",
    'raise ValueError("',
    "for key, value in sorted(items.items()):\n    ",
    "async def wait_for(fut, timeout):\n    ",
    "Return the absolute value of",
    "x = [",
]


ENGINE: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "block_size": 32}
"""Arguments of an engine, unless a test says otherwise."""


def tree(nodes: int, **options: Any) -> dict[str, Any]:
    """A speculative_config for OPT-Tree on the bundled pair, with whole trees whatever they cost; options go under
    "tree"."""
    return {"method": "opt_tree", "model": DRAFT, "num_speculative_tokens": nodes, "tree": {"budget": None, **options}}


class Engines:
    def __init__(self) -> None:
        self.llm: Any = None

    def start(self, speculative_config: dict[str, Any] | None = None, **arguments: Any) -> Any:
        from vllm import LLM

        from tests.engine.contract import is_checked

        self.shutdown()
        if V2:
            let_drafts_be_cheap()
        if speculative_config is not None and speculative_config["method"] in METHODS:  # cold, unless a test says more
            kept = {"cost_profile": None, **speculative_config.get("tree", {})}
            speculative_config = {**speculative_config, "tree": kept}
        arguments = {"model": TARGET, "kv_cache_memory_bytes": CACHE, **ENGINE, **arguments}
        self.llm = LLM(speculative_config=speculative_config, disable_log_stats=False, **arguments)
        core = self.llm.llm_engine.engine_core
        if speculative_config is not None and speculative_config["method"] in METHODS and hasattr(core, "engine_core"):
            assert is_checked(core.engine_core.scheduler)
        return self.llm

    def shutdown(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        gc.freeze()  # what is left lives as long as the process; a start collects ten times


def one_core_each(ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: a core for each rank, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def let_drafts_be_cheap() -> None:
    """At the start of engines of this process: in an interpreter drafting takes so long that all would rest."""
    from vllm_adaptive_tree.budget import Curve
    from vllm_adaptive_tree.engine.v2 import startup_costs

    startup_costs._drafts = lambda runner: (Curve([1, 2], [1e-4, 1e-4]), 0.0)


def keep_costs(llm: Any) -> None:
    """Let a budget of Model Runner V2 stay with the costs of the start: in an interpreter no draft pays."""
    if V2:
        runner_of(llm).budget._timed_steps = list


def set_costs(monkeypatch: Any, **costs: Any) -> None:
    """Let the next engines of this process measure these: "verify" and "draft" as curves' JSON, "context"."""
    from vllm_adaptive_tree.budget import Costs
    from vllm_adaptive_tree.engine.startup.measuring import MeasuredCosts

    module = importlib.import_module(f"vllm_adaptive_tree.engine.{'v2' if V2 else 'v1'}.startup_costs")
    free = {"rows": [1, 1000], "seconds": [1e-9, 1e-9]}
    found = {"draft": free, "context": 0.0, **costs}
    monkeypatch.setattr(module, "measured_costs", lambda *_: MeasuredCosts(Costs.from_json(found), 1.0))


def metric(llm: Any, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")


def generate(llm: Any, prompts: list[Any], params: Any) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_identical(plain: list[Any], speculative: list[Any], *, tie: float = 1e-5) -> None:
    """Compare token by token; one difference may occur where the plain run's two best logprobs are within `tie`.

    `plain` needs `logprobs=2`.
    """
    ties = 0
    for index, (ours, theirs) in enumerate(zip(speculative, plain, strict=True)):
        if list(ours.token_ids) == list(theirs.token_ids) and ours.finish_reason == theirs.finish_reason:
            assert ours.text == theirs.text
            continue
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        at = next((i for i, (here, there) in enumerate(pairs) if here != there), None)
        assert at is not None, f"output {index} ends elsewhere: {ours} {theirs}"
        best, second = sorted((entry.logprob for entry in theirs.logprobs[at].values()), reverse=True)[:2]
        assert best - second < tie, f"output {index} differs at token {at}: {ours.token_ids} {theirs.token_ids}"
        print(f"tie in output {index} at token {at}: logprobs {best} and {second}")
        ties += 1
    assert ties <= 1


class TreeSpy:
    """Records every tree that the runner verifies."""

    def __init__(self, llm: Any, monkeypatch: Any):
        self.trees: list[Any] = []
        self.batches: list[list[Any]] = []
        runner = runner_of(llm)
        name = "sample" if V2 else "_sample"
        original = getattr(runner, name)

        def sample(*args: Any) -> Any:
            if (verification := runner.step.verification) is not None:
                self.batches.append(_on_host(verification) if V2 else list(verification.trees.values()))
                self.trees += self.batches[-1]
            return original(*args)

        monkeypatch.setattr(runner, name, sample)


def _on_host(step: Any) -> list[TokenTree]:
    """The trees of a verification of Model Runner V2 that the scheduler has asked for."""
    rows = zip(step.tree.tokens.tolist(), step.tree.parent.tolist(), step.scheduled.tolist(), strict=True)
    found = [(tuple(token for token in tokens if token >= 0), parent) for tokens, parent, count in rows if count]
    return [TokenTree(tokens, tuple(parent[: len(tokens)])) for tokens, parent in found]
