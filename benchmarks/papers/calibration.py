"""Classifiers for C2T's ablation, trained on texts of the pair's own training set, never on held-out ones."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.papers.decoding import Cell, measure
from benchmarks.tokens_per_step import PROMPT_CHARACTERS
from examples.train_demo_pair import documents, is_held_out
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.gates.training import new_gate, train_c2t
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.base import log_softmax_at
from vllm_adaptive_tree.proposers.c2t import features
from vllm_adaptive_tree.proposers.gate import Gate, entropy

TOP_K, LEVELS, ENTROPY_TOP, NEGATIVES = 10, 11, 1000, 8  # C2T's training trees


def training_texts(count: int) -> tuple[str, ...]:
    """From the middles of modules that the pair was trained on."""
    found = documents()
    names = [name for name, text in sorted(found.items()) if not is_held_out(name) and len(text) > 2000]
    random.Random(0).shuffle(names)
    texts = [found[name] for name in sorted(names[:count])]
    return tuple(text[len(text) // 3 :][:PROMPT_CHARACTERS] for text in texts)


class Examples(NamedTuple):
    path: Tensor
    entropy: Tensor
    depth: Tensor
    label: Tensor
    prompt: Tensor


def c2t_gates(
    folder: Path, *, gates: dict[str, list[Any]], prompts: int, tokens: int, nodes: int, seeds: int
) -> dict[str, dict[str, Any]]:
    """Weights of classifiers trained on the same trees of EAGLE-2, the best of several seeds each.

    Args:
        gates: name -> [the features that it may read, of "P", "H" and "d"; hidden units; how it reads P].
    """
    parts: list[Examples] = []

    def look(proposal: Proposal, logits: Tensor, result: Accepted, alive: Tensor) -> None:
        tree = proposal.tree
        own = entropy(log_softmax_at(logits, torch.ones(logits.shape[:2])), ENTROPY_TOP)  # [R, slots]
        read = torch.nn.functional.pad(proposal.read, (1, 0))  # the root's is 0
        own = own.gather(1, read.gather(1, tree.parent + 1).clamp(min=0))
        on_path = torch.zeros(tree.tokens.shape[0], tree.tokens.shape[1] + 1)
        on_path = on_path.scatter(1, result.nodes + 1, 1.0)[:, 1:]
        prompt = alive[:, None].expand(tree.tokens.shape)
        columns = (tree.log_weight, own, tree.depth - 1, on_path, prompt)
        parts.append(Examples(*(column[tree.valid] for column in columns)))

    cell = Cell("eagle2", nodes, tree={"top_k": TOP_K, "max_depth": LEVELS}, prompts=prompts, tokens=tokens)
    measure(cell, texts=training_texts(prompts), look=look)
    found = Examples(*(torch.cat(column) for column in zip(*parts, strict=True)))
    return {name: _trained(found, *how, seeds=seeds) for name, how in gates.items()}


def _trained(found: Examples, reads: str, hidden: int, kind: str, *, seeds: int) -> dict[str, Any]:
    blind = torch.tensor([column for column, name in enumerate("PHd") if name not in reads], dtype=torch.int64)
    inputs = features(found.path, found.entropy, found.depth, kind).index_fill(1, blind, 0.0)
    trained = train_c2t(
        {"features": inputs, "label": found.label, "prompt": found.prompt},
        begin=lambda seed: new_gate(3, hidden, seed=seed, features=kind),
        negatives=NEGATIVES,
        seeds=range(seeds),
    )
    weights = trained.best.gate.state_dict()
    weights["layers.0.weight"][:, blind] = 0.0  # never trained: the column was 0
    return {
        "weights": {name: weight.tolist() for name, weight in weights.items()},
        "features": kind,
        "loss": trained.best.loss,
        "constant": trained.run.constant,
        "losses": [run.best.loss for run in trained.runs],
        "failed": sum(run.failed is not None for run in trained.runs),
        "recall": trained.best.score.recall,
        "positive_rate": trained.best.score.positive_rate,
        "examples": len(found.label),
    }


def write_gates(trained: dict[str, dict[str, Any]], folder: Path) -> None:
    """The files that cells name with an "@"."""
    for name, one in trained.items():
        weights = {key: torch.tensor(value) for key, value in one["weights"].items()}
        gate = Gate(3, len(weights["layers.0.bias"]), features=one["features"])
        gate.load_state_dict(weights)
        gate.save(folder / f"{name}.safetensors", {})
