"""An engine on the faked platform, in a process of its own: `python -m tests.cuda.start 9.0 llama [CUDAGraphMode]`."""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cuda import faked, tape

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
# All of them: which two of four are taken may hang on a rounding.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
BLOCKS = "dspark", "dflash2", "lilicorr", "xpress"
"""Heads of one forward, each of which replays vLLM's graph of its block."""
HYBRIDS = "qwen3-next", "qwen3.5"
TOLD = *HYBRIDS, "latent", "qwen3-vl", "images"
"""Cases with a draft that knows the outputs."""
NODES, DEPTH, TOKENS = 8, 4, 12
PROMPTS = [[7, 3, 9], list(range(20, 70)), [5] * 33, [11, 2] * 3]
# The last waits until one of three seats is free.
GRAPHS = [4, 16, 32]  # their sizes
CROWDED, FREE = ("head",), 9
"""Cases with so few blocks, once started, that a request is preempted."""
CUT, ROWS = ("moe",), 14
"""Cases that verify so few rows, as if the logits of more took too much memory."""


def written(folder: Path, kind: str, **more: Any) -> str:
    """A model of random weights, large enough that its logits depend on the text."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more}, initializer_range=0.2, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def scaled(folder: Path) -> str:
    """The bundled target as a checkpoint that asks for K/V of 8 bits, with scales of each KV head of each layer."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.engine.engines import TARGET

    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    arguments = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": arguments,
        "total_num_kv_heads": config["num_key_value_heads"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights, heads = load_file(folder / "model.safetensors"), config["num_key_value_heads"]
    random = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        for name, count in (("q", config["num_attention_heads"]), ("k", heads), ("v", heads)):
            weights[f"model.layers.{layer}.self_attn.{name}_scale"] = 0.02 + 0.02 * torch.rand(count, generator=random)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def hybrid(case: str, folder: Path) -> dict[str, Any]:
    """Engine arguments for a gated delta net below a layer of attention, with the states of prefixes that are vLLM's
    default."""
    from tests.engine.families import FAMILIES

    family = FAMILIES[case]
    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    few |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    if "num_experts" in family.fields:
        few |= {"num_experts": 2, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    given = {"model": replace(family, fields={**family.fields, **few}).saved(folder), "skip_tokenizer_init": True}
    given |= {"language_model_only": True} if family.sees else {}
    return {**given, "mamba_ssm_cache_dtype": "float32"}


def text_alone(case: str, folder: Path) -> dict[str, Any]:
    """Engine arguments for a class that may read images, and reads none."""
    from tests.engine.families import FAMILIES

    family = FAMILIES[case]
    sizes = {"num_hidden_layers": 2}
    model = replace(family, fields={**family.fields, **sizes}).saved(folder)
    return {"model": model, "skip_tokenizer_init": True, **family.arguments}


def latent(folder: Path) -> str:
    """A model of multi-head latent attention, with head sizes of DeepSeek's that FlashAttention takes."""
    from tests.engine.families import FAMILIES

    family = FAMILIES["deepseek-v3"]
    sizes = {"qk_nope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 2, "first_k_dense_replace": 3}
    return replace(family, fields={**family.fields, **sizes}).saved(folder)


def told(texts: list[tuple[list[int], list[int]]], folder: Path, *, chains: bool) -> dict[str, Any]:
    """`speculative_config` of a draft that knows prompts and outputs; its requests verify five nodes together."""
    from tests.engine.known import known

    speculation: dict[str, Any] = known([prompt + output for prompt, output in texts], folder, NODES, chains=chains)
    speculation["tree"]["budget"] = 5
    return speculation


def models(case: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine arguments and `speculative_config`."""
    from tests.engine import adapters, heads, images
    from tests.engine.engines import DRAFT, TARGET
    from vllm_adaptive_tree.engine.self_check import draws
    from vllm_adaptive_tree.engine.self_check.verdict import Finding
    from vllm_adaptive_tree.engine.v2 import block_speculator, verification

    if case == "fails":
        draws.check = lambda **_: Finding("draws", False, {})
    if case in ("llama", "depth first"):
        verification.IN_GENERATION_ORDER = NODES // 2 if case == "depth first" else NODES
        return {"model": TARGET}, {"model": DRAFT}
    if case == "lora":
        target = written(folder / "target", "qwen3")
        adapters.adapter(folder / "adapter", target, seed=1, scale=0.06)
        given = {"enable_lora": True, "max_loras": 2, "max_lora_rank": adapters.RANK, "skip_tokenizer_init": True}
        return {"model": target, **given}, {"model": target, "tree": {"budget": 5}}
    if case == "fp8":
        return {"model": TARGET, "kv_cache_dtype": "fp8"}, {"model": DRAFT}
    if case == "fp8 checkpoint":
        return {"model": scaled(folder / "target")}, {"model": DRAFT}
    if case == "head":
        head = heads.eagle3(folder / "head")
        return {"model": TARGET}, {"method": "dyspec", "model": head, "tree": {"budget": "auto"}}
    if case in HYBRIDS:
        return hybrid(case, folder / "target"), {}
    if case == "qwen3-vl":
        return text_alone(case, folder / "target"), {}
    if case == "images":
        # With FlashAttention vLLM asks the device, which is faked, whether it records the encoder.
        return {"model": images.saved(folder / "target"), "mm_encoder_attn_backend": "TORCH_SDPA"}, {}
    if case == "latent":
        return {"model": latent(folder / "target"), "skip_tokenizer_init": True}, {}
    if case == "latent module":
        from tests.engine.latent import with_module

        target = with_module(latent(folder / "target"), folder / "with module")
        return {"model": target, "skip_tokenizer_init": True}, {"model": target, "tree": {"draft": "mtp"}}
    if case == "latent, draft":
        draft = written(folder / "draft", "qwen3", vocab_size=512)
        return {"model": latent(folder / "target"), "skip_tokenizer_init": True}, {"model": draft}
    if case in BLOCKS:
        block_speculator.ladder = lambda most: [1, most]  # two requests run in the graph of three
        return {"model": TARGET}, {"model": getattr(heads, case)(folder / "head")}
    kind, more = {"moe": ("qwen3_moe", EXPERTS)}.get(case, ("qwen3", {}))
    target = written(folder / "target", kind, **more)
    learnt = {"max_children": 4, "budget": 6, "lookup": "ngram"}
    methods = {
        "adaptive": {"method": "adaptive_tree", "tree": learnt},
        "moe": {"method": "dyspec", "rejection_sample_method": "rrsw"},
    }
    method: dict[str, Any] = methods.get(case, {})
    return {"model": target, "skip_tokenizer_init": True}, {"model": target, **method}


class Blocks:
    """Blocks of a head of one forward from now on, and replays of their graphs."""

    def __init__(self, runner: Any):
        self.run = self.replayed = 0
        if hasattr(runner.speculator, "block_graphs"):
            self.block, manager = runner.speculator.block, runner.speculator.block_graphs
            self.propose, self.replay = self.block.propose, manager.run_fullgraph
            self.block.propose, manager.run_fullgraph = self._propose, self._replay

    def _propose(self, *args: Any, **given: Any) -> Any:
        self.run += not self.block.resting
        return self.propose(*args, **given)

    def _replay(self, graph: Any) -> None:
        self.replayed += 1
        self.replay(graph)


def watch_costs() -> list[tuple[int, int]]:
    """Of each number of requests whose drafting is timed at the start: steps, and replays of graphs of trees."""
    from vllm_adaptive_tree.engine.v2 import startup_costs
    from vllm_adaptive_tree.engine.v2.graphs import DraftGraphs

    timed, drafting, replay = list[tuple[int, int]](), startup_costs._drafting, DraftGraphs.run_fullgraph
    replayed = list[int]()

    def count(graphs: Any, piece: Any) -> None:
        replayed.append(piece.levels)
        replay(graphs, piece)

    def watched(runner: Any, requests: int) -> Any:
        replayed.clear()
        found = drafting(runner, requests)
        timed.append((startup_costs.ROUNDS, sum(levels > 0 for levels in replayed)))
        return found

    startup_costs._drafting, DraftGraphs.run_fullgraph = watched, count
    return timed


class Steps:
    """Graphs of the target's steps from now on."""

    def __init__(self, runner: Any):
        self.runner, self.found = runner, list[dict[str, Any]]()
        self.dispatch, self.prepare = runner.cudagraph_manager.dispatch, runner.prepare_attn
        runner.cudagraph_manager.dispatch, runner.prepare_attn = self._dispatch, self._prepare

    def _dispatch(self, *args: Any, **given: Any) -> Any:
        self.graph = self.dispatch(*args, **given)
        return self.graph

    def _prepare(self, batch: Any) -> Any:
        figures = {"rows": batch.num_tokens, "nodes": batch.num_draft_tokens, "prompts": batch.has_prefill}
        self.found.append({"mode": self.graph.cg_mode.name, "size": self.graph.num_tokens, **figures})
        return self.prepare(batch)


def main(capability: str, case: str, graphs: str = "NONE") -> dict[str, Any]:
    device = int(capability.split(".")[0]), int(capability.split(".")[1])
    (faked if graphs == "NONE" else tape).install(device)
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    trees, verdicts, compiled = faked.watch_trees(), faked.watch_verdicts(), faked.watch_kernels()
    from tests.engine import contract, images, torchvision
    from tests.engine.engines import Engines, metric, runner_of
    from vllm_adaptive_tree.engine.v2.node_selection import NoNodes

    contract.install()
    costs, engines, found = watch_costs(), Engines(), {}
    whole: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    # The first ends before the others, and the prompt that waits is read beside their trees.
    params = [SamplingParams(**whole, max_tokens=TOKENS - 4 * (at == 0), logprobs=2) for at in range(len(PROMPTS))]
    with tempfile.TemporaryDirectory() as folder, torchvision.imported(Path(folder) / "packages"):
        given, speculative = models(case, Path(folder))
        options = {"budget": None, "max_depth": DEPTH, **speculative.pop("tree", {})}
        tree = {"method": "opt_tree", "num_speculative_tokens": NODES, "tree": options, **speculative}
        for name, speculation in (("plain", None), ("tree", tree)):
            if name == "tree" and case in TOLD:
                texts = zip(found["plain"]["prompts"], found["plain"]["tokens"], strict=True)
                speculation.update(told(list(texts), Path(folder), chains=case in HYBRIDS))
            llm = engines.start(
                speculation,
                **given,
                dtype="bfloat16",
                enforce_eager=False,
                compilation_config={"mode": 0, "cudagraph_mode": "NONE"}
                if graphs == "NONE" or speculation is None
                else {"mode": 0, "cudagraph_mode": graphs, "cudagraph_capture_sizes": GRAPHS},
                max_num_seqs=3,
                max_num_batched_tokens=256,
                gpu_memory_utilization=0.01,
                block_size=None,
            )
            if case in CROWDED and speculation is not None:
                pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
                pool.get_new_blocks(pool.get_num_free_blocks() - FREE)
            if case in CUT and speculation is not None:
                runner_of(llm).adaptive_verification.most_rows = ROWS
            started, checked, early = len(faked.LAUNCHES), len(trees), set(compiled)
            steps, blocks = Steps(runner_of(llm)), Blocks(runner_of(llm))
            prompts: list[Any] = [{"prompt_token_ids": one} for one in PROMPTS]
            if case == "images":
                prompts[1] = images.prompt(PROMPTS[1][:20], 1, PROMPTS[1][20:])
                prompts[3] = images.prompt(PROMPTS[3], 2)
            adapted = [LoRARequest("one", 1, f"{folder}/adapter"), None] * 2 if case == "lora" else None
            requests = llm.generate(prompts, params, lora_request=adapted, use_tqdm=False)
            outputs = [one.outputs[0] for one in requests]
            found[name] = {
                "prompts": [list(one.prompt_token_ids) for one in requests],
                "tokens": [list(one.token_ids) for one in outputs],
                "best_two": [
                    [sorted((entry.logprob for entry in row.values()), reverse=True)[:2] for row in one.logprobs]
                    for one in outputs
                ],
                "kernels": sorted({launch.kernel for launch in faked.LAUNCHES}),
                "warmed_up": started > 0,
            }
        brief: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "detokenize": False}
        for more in ({}, {"repetition_penalty": 1.2}):
            mixed = [SamplingParams(temperature=temperature, **brief, **more) for temperature in (0, 1, 0.7)]
            llm.generate(prompts[:3], mixed, use_tqdm=False)
        runner = runner_of(llm)
        selection, runner.adaptive_verification = runner.adaptive_verification, runner._selection(NoNodes, None)
        short = SamplingParams(**whole, max_tokens=TOKENS // 2)
        rested = llm.generate(prompts, short, lora_request=adapted, use_tqdm=False)
        at_rest = [one.outputs[0].token_ids for one in rested]
        runner.adaptive_verification = selection
        layers = runner.compilation_config.static_forward_context.values()
        found |= {
            "worker": type(runner).__mro__[1].__name__,
            "layers": sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}),
            "checked": checked,
            "early": sorted({kernel for kernel, *_ in early}),
            "late": sorted(compiled - early),
            "off": runner.off,
            "verdict": str(verdicts[0]),
            "trees": trees[checked:],
            "steps": steps.found,
            "blocks": [blocks.run, blocks.replayed],
            "costs": costs,
            "preempted": metric(llm, "num_preemptions"),
            "at_rest": [list(one) for one in at_rest],
            "plain_briefly": [one[: short.max_tokens] for one in found["plain"]["tokens"]],
            "drafts": metric(llm, "spec_decode_num_drafts"),
        }
    engines.shutdown()
    return found


if __name__ == "__main__":
    print("RESULT" + json.dumps(main(*sys.argv[1:])))
