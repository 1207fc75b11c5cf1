"""Classifiers for C2T's ablation, trained on texts of the pair's own training set, never on held-out ones."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.papers.decoding import Cell, measure
from benchmarks.tokens_per_step import PROMPT_CHARACTERS
from examples.train_demo_pair import documents, is_held_out
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.gates.mlp import entropy
from vllm_adaptive_tree.gates.training import fresh, train_c2t
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.base import log_law
from vllm_adaptive_tree.proposers.c2t import features

TOP_K, LEVELS, ENTROPY_TOP, NEGATIVES = 10, 11, 1000, 8  # C2T's training trees


def training_texts(count: int) -> tuple[str, ...]:
    """From the middles of modules that the pair was trained on."""
    found = documents()
    names = [name for name, text in sorted(found.items()) if not is_held_out(name) and len(text) > 2000]
    random.Random(0).shuffle(names)
    texts = [found[name] for name in sorted(names[:count])]
    return tuple(text[len(text) // 3 :][:PROMPT_CHARACTERS] for text in texts)


def c2t_gates(
    folder: Path, *, gates: dict[str, list[Any]], prompts: int, tokens: int, nodes: int
) -> dict[str, dict[str, Any]]:
    """Weights of classifiers trained on the same trees of EAGLE-2.

    Args:
        gates: name -> [the features that it may read, of "P", "H" and "d"; hidden units].
    """
    examples: list[tuple[Tensor, Tensor, Tensor]] = []

    def look(proposal: Proposal, logits: Tensor, result: Accepted) -> None:
        tree = proposal.tree
        own = entropy(log_law(logits, torch.ones(logits.shape[:2])), ENTROPY_TOP)  # [R, slots]
        read = torch.nn.functional.pad(proposal.read, (1, 0))  # the root's is 0
        own = own.gather(1, read.gather(1, tree.parent + 1).clamp(min=0))
        on_path = torch.zeros(tree.tokens.shape[0], tree.tokens.shape[1] + 1)
        on_path = on_path.scatter(1, result.nodes + 1, 1.0)[:, 1:]
        inputs = features(tree.log_weight, own, tree.depth - 1)
        requests = torch.arange(len(inputs))[:, None].expand(tree.tokens.shape)
        examples.append((inputs[tree.valid], on_path[tree.valid], requests[tree.valid]))

    cell = Cell("eagle2", nodes, tree={"top_k": TOP_K, "max_depth": LEVELS}, prompts=prompts, tokens=tokens)
    measure(cell, texts=training_texts(prompts), look=look)
    inputs, label, request = (torch.cat(column) for column in zip(*examples, strict=True))
    return {
        name: _trained(inputs, label, request, reads, hidden) | {"examples": len(label)}
        for name, (reads, hidden) in gates.items()
    }


def _trained(inputs: Tensor, label: Tensor, request: Tensor, reads: str, hidden: int) -> dict[str, Any]:
    blind = torch.tensor([column for column, name in enumerate("PHd") if name not in reads], dtype=torch.int64)
    columns = {"features": inputs.index_fill(1, blind, 0.0), "label": label, "prompt": request}
    best = train_c2t(columns, gate=fresh(3, hidden), negatives=NEGATIVES).best
    weights = best.gate.state_dict()
    weights["layers.0.weight"][:, blind] = 0.0  # never trained: the column was 0
    return {
        "weights": {name: weight.tolist() for name, weight in weights.items()},
        "loss": best.loss,
        "recall": best.score.recall,
        "positive_rate": best.score.positive_rate,
    }


def write_gates(trained: dict[str, dict[str, Any]], folder: Path) -> None:
    """The files that cells name with an "@"."""
    for name, one in trained.items():
        weights = {key: torch.tensor(value) for key, value in one["weights"].items()}
        save_file(weights, folder / f"{name}.safetensors")
