"""Record verified trees for `python -m benchmarks.planner`: what a draft put on each node, and what was accepted.

    python -m benchmarks.planner.record OUT.npz --method opt_tree --draft bundled
    python -m benchmarks.planner.record OUT.npz --draft smollm2 --steps 24 --humaneval HumanEval.jsonl.gz

Starts an engine on the bundled pair (Model Runner V1, CPU) that verifies every drafted node, and decodes the same
prompts greedily and at temperature 1. `--draft`: bundled; noisy, the bundled one with noise on its weights, which
agrees much less; random, with fresh weights; or smollm2, SmolLM2 with its EAGLE-3 head, on HumanEval's questions.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
AT_A_TIME = 12
"""Requests of the engine's batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", default="opt_tree")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of more keys of `tree`")
    parser.add_argument("--draft", choices=("bundled", "noisy", "random", "smollm2"), default="bundled")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz, for smollm2")
    parser.add_argument("--noise", type=float, default=0.3, help="of a noisy draft, in deviations of each weight")
    parser.add_argument("--nodes", type=int, default=32, help="more than those replayed: shallower trees are wider")
    parser.add_argument("--requests", type=int, default=24, help="of either temperature")
    parser.add_argument("--steps", type=int, default=48, help="of each request")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        record(options, Path(folder))


def record(options: argparse.Namespace, folder: Path) -> None:
    from vllm import LLM, SamplingParams

    from benchmarks.planner.recording import Recording

    tree = {"budget": AT_A_TIME * options.nodes, "cost_profile": None, **options.options}
    if options.method == "opt_tree":
        tree = {"threshold": 0, **tree}  # every level
    elif options.method == "dyspec":
        tree = {"mode": "heap", **tree}  # every tree in its full size
    target, draft, prompts = pair(options, folder)
    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=AT_A_TIME,
        max_num_batched_tokens=4096,
        speculative_config={
            "method": options.method,
            "model": draft,
            "num_speculative_tokens": options.nodes,
            "tree": tree,
        },
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    seen: dict[str, list[tuple[Any, list[float], int]]] = {}
    verified = runner.budget.verified

    def see(step: Any, accepted: Any) -> None:
        for row, draft in step.drafts.items():
            last = max(accepted.nodes[row].tolist())  # a node comes after its parent
            seen.setdefault(runner.input_batch.req_ids[row], []).append(
                (draft.tree.parents, draft.value.tolist(), last)
            )
        verified(step, accepted)

    runner.budget.verified = see
    streams, kinds = [], []
    for temperature in (0.0, 1.0):
        seen.clear()
        most = (9 if options.draft == "bundled" else 5) * options.steps
        params = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True, seed=1)
        llm.generate(prompts, params, use_tqdm=False)
        found = [steps[: options.steps] for steps in seen.values()]
        assert len(found) == options.requests
        assert all(2 * len(steps) >= options.steps for steps in found), sorted(map(len, seen.values()))
        streams += found
        kinds += [temperature == 0] * len(found)
    name = f"{'SmolLM2, head' if options.draft == 'smollm2' else f'{options.draft} draft'}, {options.method}"
    traits = runner.cuts_sampled, runner.proposer.by_place, options.method == "opt_tree"
    recording = Recording(name, traits, kinds, streams)
    recording.save(options.out)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes; {recording}")


def pair(options: argparse.Namespace, folder: Path) -> tuple[str, str, list[str]]:
    """Target, draft and prompts."""
    from vllm_adaptive_tree.bench.demo_models import chat_prompts
    from vllm_adaptive_tree.bench.environment import SMOLLM2_HEAD, TARGET
    from vllm_adaptive_tree.bench.workloads import standard_library
    from vllm_adaptive_tree.files import cache_folder
    from vllm_adaptive_tree.models.fetch import fetch

    if options.draft != "smollm2":
        return TARGET, draft_folder(options, folder), list(standard_library()[: options.requests])
    from benchmarks.smollm2 import humaneval

    model = fetch("smollm2", cache_folder() / "models", say=print).folder
    return str(model), SMOLLM2_HEAD, list(chat_prompts(model, humaneval(options.humaneval, options.requests)))


def draft_folder(options: argparse.Namespace, folder: Path) -> str:
    from vllm_adaptive_tree.bench.environment import DRAFT
    from vllm_adaptive_tree.bench.models import random_draft

    bundled = Path(DRAFT)
    if options.draft == "bundled":
        return str(bundled)
    if options.draft == "random":
        return random_draft(str(bundled), folder)
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(bundled, folder / "noisy")
    weights = load_file(bundled / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for weight in weights.values():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
            weight.add_((options.noise * noise).to(weight.dtype))
    save_file(weights, folder / "noisy" / "model.safetensors", metadata={"format": "pt"})
    return str(folder / "noisy")


if __name__ == "__main__":
    main()
