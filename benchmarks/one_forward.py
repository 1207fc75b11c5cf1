"""A head of one forward at one request: vLLM's chain of it, trees on its marginals, trees on its conditionals.

    python -m benchmarks.one_forward --out benchmarks/results/one_forward.json

The bundled target and its DSpark head, float32, held-out modules, one request at a time, all rows in one process.
`--enlarge-to 0.5B --dtype bfloat16` gives the target MLP units whose output is zero: the same text at the cost of a
larger model, of which a draft forward is a small part.
vLLM's Model Runner V1 has no DSpark: its chain, and the marginal trees, are of the same checkpoint without the Markov
head, which is a DFlash head. On CPUs its chains sample wrongly (vLLM issue 55005): that is repaired here. Every row
decodes the same prompts several times, and the fastest round counts. Seconds are wall-clock and, for a busy machine,
CPU seconds of this process.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tokens_per_step import PAIR, prompts, start
from vllm_adaptive_tree.bench.models import enlarge
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.bench.vllm_55005 import repair_sampling
from vllm_adaptive_tree.cli.arguments import parameters

NEW_TOKENS = 96


def marginals(head: Path, folder: Path) -> str:
    """Checkpoint without its Markov head."""
    from safetensors.torch import load_file, save_file

    config = json.loads((head / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    for name in [name for name in config if name.startswith(("markov", "dspark")) or name == "sample_from_anchor"]:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(head / "model.safetensors")
    save_file({name: one for name, one in weights.items() if "markov" not in name}, folder / "model.safetensors")
    return str(folder)


def rows(head: Path, dflash: str, nodes: list[int]) -> dict[str, dict[str, Any] | None]:
    draft = str(PAIR / "draft")

    def tree(model: str, count: int, **options: Any) -> dict[str, Any]:
        return {"method": "opt_tree", "model": model, "num_speculative_tokens": count, "tree": options}

    whole: dict[str, Any] = {"budget": None, "threshold": 0}
    found: dict[str, dict[str, Any] | None] = {"plain": None}
    for length in (3, 5, 7):
        found[f"chain of the head, {length}"] = {"method": "dflash", "model": dflash, "num_speculative_tokens": length}
        model = {"method": "draft_model", "model": draft, "num_speculative_tokens": length}
        found[f"chain of the draft model, {length}"] = model
    for count in nodes:
        found[f"marginal tree, {count}"] = tree(dflash, count, **whole)
        found[f"conditional tree, {count}"] = tree(str(head), count, **whole)
    found["marginal tree, auto"] = tree(dflash, max(nodes), cost_profile=None)
    found["conditional tree, auto"] = tree(str(head), max(nodes), cost_profile=None)
    found["tree of the draft model, auto"] = tree(draft, max(nodes), cost_profile=None)
    return found


def counts(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in llm.get_metrics():
        if one.name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"):
            found[one.name] = one.value
        if one.name.startswith("vllm:adaptive_tree_phase_seconds"):
            phase = one.labels["phase"]
            found[phase] = found.get(phase, 0.0) + one.sum
    return found


def decode(llm: Any, texts: list[str], temperature: float) -> dict[str, float]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    before, clock, own = counts(llm), time.perf_counter(), time.process_time()
    for text in texts:
        llm.generate([text], params, use_tqdm=False)
    found = {"seconds": time.perf_counter() - clock, "cpu": time.process_time() - own}
    after = counts(llm)
    return found | {name: after[name] - before.get(name, 0.0) for name in after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=PAIR / "lattice_head")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--enlarge-to", type=parameters, help="parameters of the target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts, found = prompts(options.prompts), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        target = PAIR / "target"
        if options.enlarge_to:
            target = Path(folder, "target")
            enlarge(PAIR / "target", target, options.enlarge_to)
        for name, spec in rows(options.head, marginals(options.head, Path(folder)), options.nodes).items():
            if options.only not in name:
                continue
            llm = start(spec, target, options.dtype)
            repair_sampling()
            for temperature in options.temperatures:
                decode(llm, texts[:2], temperature)
                each = [decode(llm, texts, temperature) for _ in range(options.rounds)]
                tokens, best = len(texts) * NEW_TOKENS, {}
                for unit in ("seconds", "cpu"):
                    best[f"tokens_per_{unit}"] = tokens / min(one[unit] for one in each)
                drafts = sum(one.get("vllm:spec_decode_num_drafts", 0.0) for one in each)
                accepted = sum(one.get("vllm:spec_decode_num_accepted_tokens", 0.0) for one in each)
                steps = max(1.0, len(each) * tokens - accepted)
                phases = {
                    phase: 1e3 * statistics.fmean(one[phase] for one in each) * len(each) / steps
                    for phase in ("verify", "accept", "commit", "draft", "tree")
                    if phase in each[0]
                }
                row = {"row": name, "temperature": temperature, "tokens_per_step": len(each) * tokens / steps, **best}
                row |= {"drafts_per_step": drafts / steps, "milliseconds_per_step": phases}
                found.append(row)
                print(json.dumps(row), flush=True)
            llm.llm_engine.engine_core.shutdown()
    if options.out:
        save(options.out, found)


if __name__ == "__main__":
    main()
