"""Calibration of methods to the pair for these tables, from texts of its own training set, never from held-out ones."""

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.papers.decoding import Cell, measure
from benchmarks.papers.models import subject
from benchmarks.tokens_per_step import PROMPT_CHARACTERS
from examples.train_demo_pair import documents, is_held_out
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.gates.training import Trained, new_gate, train_c2t
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.base import log_softmax_at
from vllm_adaptive_tree.proposers.c2t import features
from vllm_adaptive_tree.proposers.gate import Gate, entropy

TOP_K, LEVELS, ENTROPY_TOP = 10, 11, 1000  # C2T's training trees
NEGATIVES = 8  # the default of `train-gate`, with which the bundled gate is trained


def training_texts(count: int) -> tuple[str, ...]:
    """What methods learn from: for the bundled pair, middles of modules that it was trained on."""
    if subject().learnt_from:
        return subject().learnt_from[:count]
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


@lru_cache(maxsize=1)
def examples(prompts: int, tokens: int, nodes: int, draft_temperature: float = 1.0) -> Examples:
    """Of C2T's classifier: the nodes of EAGLE-2's trees, shaped and read at a temperature of the draft."""
    parts: list[Examples] = []

    def look(proposal: Proposal, logits: Tensor, result: Accepted, alive: Tensor) -> None:
        tree = proposal.tree
        own = entropy(
            log_softmax_at(logits, torch.full(logits.shape[:2], draft_temperature)), ENTROPY_TOP
        )  # [R, slots]
        read = torch.nn.functional.pad(proposal.read, (1, 0))  # the root's is 0
        own = own.gather(1, read.gather(1, tree.parent + 1).clamp(min=0))
        on_path = torch.zeros(tree.tokens.shape[0], tree.tokens.shape[1] + 1)
        on_path = on_path.scatter(1, result.nodes + 1, 1.0)[:, 1:]
        prompt = alive[:, None].expand(tree.tokens.shape)
        columns = (tree.log_weight, own, tree.depth - 1, on_path, prompt)
        parts.append(Examples(*(column[tree.valid] for column in columns)))

    tree = {"top_k": TOP_K, "max_depth": LEVELS, "draft_temperature": draft_temperature}
    cell = Cell("eagle2", nodes, tree=tree, prompts=prompts, tokens=tokens)
    measure(cell, texts=training_texts(prompts), look=look)
    return Examples(*(torch.cat(column) for column in zip(*parts, strict=True)))


def c2t_gates(
    _: Path,
    *,
    gates: dict[str, list[Any]],
    prompts: int,
    tokens: int,
    nodes: int,
    seeds: int,
    draft_temperature: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """C2T's classifier, the best of several seeds, as `train-gate` gives it.

    Args:
        gates: name -> [the features that it may read, of "P", "H" and "d"; hidden units; how it reads P].
    """
    seen = examples(prompts, tokens, nodes, draft_temperature)
    found = {name: _train(seen, *how, seeds=seeds) for name, how in gates.items()}
    return {
        name: {
            "weights": _weights(trained.best.gate),
            "features": trained.best.gate.features,
            "loss": trained.best.loss,
            "losses": [run.best.loss for run in trained.runs],
            "constant": trained.run.constant,
        }
        for name, trained in found.items()
    }


def c2t_trainings(
    _: Path, *, reads: str, hidden: int, prompts: int, tokens: int, nodes: int, seeds: int
) -> dict[str, Any]:
    """C2T's classifier from every seed that learnt something; arguments as of `c2t_gates`."""
    trained = _train(examples(prompts, tokens, nodes), reads, hidden, "paper", seeds=seeds)
    learnt = [run.best for run in trained.runs if run.failed is None]
    return {
        "weights": [_weights(one.gate) for one in learnt],
        "losses": [one.loss for one in learnt],
        "failed": seeds - len(learnt),
        "constant": trained.run.constant,
    }


def _train(found: Examples, reads: str, hidden: int, kind: str, *, seeds: int) -> Trained:
    blind = torch.tensor([column for column, name in enumerate("PHd") if name not in reads], dtype=torch.int64)
    inputs = features(found.path, found.entropy, found.depth, kind).index_fill(1, blind, 0.0)
    trained = train_c2t(
        {"features": inputs, "label": found.label, "prompt": found.prompt},
        begin=lambda seed: new_gate(3, hidden, seed=seed, features=kind),
        negatives=NEGATIVES,
        seeds=range(seeds),
    )
    for run in trained.runs:
        run.best.gate.state_dict()["layers.0.weight"][:, blind] = 0.0  # never trained: the column was 0
    return trained


def _weights(gate: Gate) -> dict[str, Any]:
    return {name: weight.tolist() for name, weight in gate.state_dict().items()}


def write_gate(name: str, weights: dict[str, Any], folder: Path, *, kind: str = "paper") -> None:
    """The file that cells name "@{name}.safetensors"."""
    tensors = {key: torch.tensor(value) for key, value in weights.items()}
    gate = Gate(3, len(tensors["layers.0.bias"]), features=kind)
    gate.load_state_dict(tensors)
    gate.save(folder / f"{name}.safetensors", {})


def joint_gate(folder: Path, least: float) -> None:
    """DyJoint of C2T's Table 3 as a gate: a node passes at 0.5 where its path probability is at least this."""
    gate = Gate(3, 1)
    steep = 1e4
    gate.load_state_dict(
        {
            "layers.0.weight": torch.tensor([[1.0, 0.0, 0.0]]),
            "layers.0.bias": torch.zeros(1),
            "layers.2.weight": torch.tensor([[steep]]),
            "layers.2.bias": torch.tensor([-steep * least]),
        }
    )
    gate.save(folder / f"joint {least:g}.safetensors", {})


def acceptance_rates(
    _: Path, *, rule: str, children: str | None, width: int, temperature: float, prompts: int, tokens: int
) -> list[float]:
    """Sequoia's vector for a rule: how often each child of the root is the accepted one, in trees of one level."""
    tree = {"shape": [width]} | ({"children": children} if children else {})
    cell = Cell("static_tree", width, temperature, rule, tree, prompts=prompts, tokens=tokens)
    record = measure(cell, texts=training_texts(prompts))
    return [round(count / sum(record["steps"]), 5) for count in record["ranks"][:width]]


def write_vector(name: str, vector: list[float], folder: Path) -> None:
    """The file that cells name "@{name}.json"."""
    (folder / f"{name}.json").write_text(json.dumps({"vector": vector}))
