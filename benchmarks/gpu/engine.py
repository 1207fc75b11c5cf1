"""The whole engine on a GPU: does it say what vLLM says, and does a step of ours wait for the device?

    python -m benchmarks.gpu.engine --out benchmarks/results/gpu/engine.json

`identical`: of so many greedy requests in one batch, bfloat16, those with the tokens of vLLM without speculation, per
method. `waits`: places of this package at which a decoding step made the host wait, by PyTorch's synchronization debug
mode; vLLM's own are counted beside them. Speeds are `vllm-adaptive-tree bench`'s.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_adaptive_tree.bench.prompts import PROMPTS

PAIR = Path("vllm_adaptive_tree/demo_pair")
METHODS = ("opt_tree", "dyspec", "eagle2", "mcsd")
NODES, TOKENS, REQUESTS = 16, 64, 16
SHARE = 0.2  # of the memory, for each engine


def engine(model: str, speculation: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        model,
        dtype="bfloat16",
        speculative_config=speculation,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=SHARE,
    )


def tokens(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


@contextmanager
def waiting() -> Iterator[list[str]]:
    """Where the host waits for the device inside."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA operation" in str(one.message)]


def measured(model: str, draft: str) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # PyTorch watches this process
    plain = engine(model, None)
    expected = tokens(plain)
    rows = []
    for method in METHODS:
        llm = engine(model, {"method": method, "model": draft, "num_speculative_tokens": NODES})
        found = tokens(llm)
        with waiting() as places:
            again = tokens(llm)
        ours = sorted({place for place in places if "vllm_adaptive_tree" in place})
        row = {
            "method": method,
            "identical": sum(one == other for one, other in zip(found, expected, strict=True)),
            "identical_again": sum(one == other for one, other in zip(again, expected, strict=True)),
            "requests": len(expected),
            "waits": ours,
            "waits_of_vllm": len(places) - sum("vllm_adaptive_tree" in place for place in places),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        llm.llm_engine.engine_core.shutdown()
    return {"torch": torch.__version__, "nodes": NODES, "tokens": TOKENS, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu/engine.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu.engine needs a CUDA device, and PyTorch sees none here.", file=sys.stderr)
        return 2
    results = {"device": torch.cuda.get_device_name(), **measured(options.model, options.draft)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    good = all(row["identical"] == row["requests"] and not row["waits"] for row in results["rows"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
