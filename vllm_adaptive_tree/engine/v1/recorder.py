"""Collects training examples for gates and vectors while requests are decoded; off until a worker is told to record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.target import Target
from vllm_adaptive_tree.gates.examples import EXAMPLE_BUILDERS, Examples, Verified
from vllm_adaptive_tree.gates.parts import Progress, write_part


class Recorder:
    """Collects examples of one kind, from requests with names that begin with the number of their prompt and no
    sampling parameter but the temperature."""

    def __init__(self, kind: str, options: dict[str, Any]):
        self.examples_of, self.options = EXAMPLE_BUILDERS[kind], options
        self.reads_hidden = kind == "mcsd-type1"
        self.seen: list[Examples] = []  # one entry per tree

    def see(self, drafts: dict[int, Draft], requests: Sequence[Any], nodes: Tensor, target: Target) -> None:
        """Collect the trees of one step. `drafts`: by batch row; `requests`: vLLM's states of all rows; `nodes`: the
        accepted ones [R, L], -1 pads."""
        for row, draft in drafts.items():
            if not len(draft.tree):
                continue
            first = int(target.first[row])
            logits = target.logits[first : first + 1 + len(draft.tree)]
            verified = _verified(draft, nodes[row], logits, requests[row].sampling_params.temperature)
            examples = self.examples_of(verified, **self.options)
            prompt = int(requests[row].req_id.partition("-")[0])
            self.seen.append(examples | {"prompt": torch.full((len(next(iter(examples.values()))),), prompt)})

    def save(self, file: Path, progress: Progress) -> int:
        """Write the examples and forget them; `progress`: of the prompts. Returns the number of trees."""
        trees, self.seen = self.seen, []
        if trees:
            columns = {name: torch.cat([part[name] for part in trees]) for name in trees[0]}
            write_part(file, columns, trees=len(trees), progress=progress)
        return len(trees)


def _verified(draft: Draft, nodes: Tensor, target: Tensor, temperature: float) -> Verified:
    tree = draft.tree
    accepted = torch.zeros(len(tree), dtype=torch.bool)
    accepted[nodes[nodes >= 0]] = True
    assert draft.logits is not None
    return Verified(
        tokens=torch.tensor(tree.tokens),
        parent=torch.tensor(tree.parents),
        depth=torch.tensor(tree.depths),
        accepted=accepted,
        row=torch.tensor(draft.row),
        draft=draft.logits,
        hidden=draft.hidden,
        draft_temperature=draft.temperature,
        target=target,
        temperature=temperature,
    )
