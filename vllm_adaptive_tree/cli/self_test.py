"""Short test of an engine on the bundled pair, in a process of its own: the text must be the same without trees."""

import json
import os
import subprocess
import sys
import time
from typing import Any

from vllm_adaptive_tree.bench.environment import DRAFT, TARGET, set_environment
from vllm_adaptive_tree.bench.prompts import PROMPTS
from vllm_adaptive_tree.proposers import RECOMMENDED
from vllm_adaptive_tree.version import pip_install

CONFIG = {
    "method": RECOMMENDED,
    "model": DRAFT,
    "num_speculative_tokens": 12,
    "tree": {"budget": None, "cost_profile": None},
}
TOKENS = 32
LONGEST = 300
"""Seconds until the test fails; about twenty are usual."""


def self_test() -> dict[str, Any]:
    """Result: {"passed": True if all texts are equal, figures}, or {"passed": False, "error": the reason}."""
    if not os.path.isdir(TARGET):
        return {"passed": False, "error": f"the bundled pair is missing: {pip_install('demo')}"}
    started = time.perf_counter()
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "error": f"it has not ended within {LONGEST} seconds"}
    if run.returncode:
        return {"passed": False, "error": run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "it died"}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def described(found: dict[str, Any]) -> str:
    """The result of `self_test`, in words."""
    if "error" in found:
        return str(found["error"])
    return (
        f"{found['equal texts']} of {found['texts']} texts are equal with and without trees, "
        f"{found['tokens per step']} tokens per step, {found['seconds']} s"
    )


def main() -> None:
    set_environment(TARGET, DRAFT)
    plain, _ = _texts(None)
    trees, steps = _texts(CONFIG)
    tokens = sum(map(len, trees)) - len(trees)  # each first token is of its prompt's step
    equal = sum(one == other for one, other in zip(plain, trees, strict=True))
    figures = {"equal texts": equal, "texts": len(plain), "tokens per step": round(tokens / steps, 2)}
    print(json.dumps({"passed": equal == len(plain), **figures}))


def _texts(speculation: dict[str, Any] | None) -> tuple[list[list[int]], float]:
    """Greedy tokens of some prompts, and the number of steps of their requests."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        TARGET,
        speculative_config=speculation,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS[:4]), sampling, use_tqdm=False)
    steps = sum(found.value for found in llm.get_metrics() if found.name == "vllm:adaptive_tree_decode_steps")
    llm.llm_engine.engine_core.shutdown()
    return [list(one.outputs[0].token_ids) for one in outputs], steps


if __name__ == "__main__":
    main()
