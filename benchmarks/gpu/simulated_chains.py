"""Tokens per second of chains of adaptive length, as hybrid targets have them, on a simulated device, of fixed chains.

    python -m benchmarks.gpu.simulated_chains --out benchmarks/results/gpu/simulated_chains.json

The device and the budget are those of `simulated`, with right costs of the start: a draft of 1.5 ms a level, or a
module of 0.4 ms. Requests are greedy. Each is in easy text, where the next token of a chain is right with .9, or in
hard text, with .4, and the draft knows which; they take turns after 20 or 100 steps in the mean. The budget chooses the
levels of a step and the nodes of the batch, of which the likeliest are verified. A fixed chain drafts and verifies as
many for all.
"""

import argparse
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.simulated import Device, dense, draft
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.engine.v2.phase_times import PhaseTimes
from vllm_adaptive_tree.trees import TreeBatch

LONGEST = 10
CHANCES = 0.9, 0.4
"""Chances of a chain's next token in easy and in hard text."""
LASTING = 20, 100
"""Steps in the mean after which the text of a request changes."""
FIXED = 1, 2, 3, 5, 8
REQUESTS = 1, 8, 32, 128
STEPS, WARM = 6000, 1000


class Texts:
    """Texts of some requests."""

    def __init__(self, requests: int, lasting: int):
        self.change = 1 / lasting
        self.rng, self.turns = random.Random(0), random.Random(1)
        self.chance = np.array([self.turns.choice(CHANCES) for _ in range(requests)])

    def step(self, lengths: np.ndarray) -> np.ndarray:
        """Accepted nodes of chains of these lengths; the texts go on."""
        accepted = np.zeros(len(lengths), dtype=int)
        for request, (length, chance) in enumerate(zip(lengths.tolist(), self.chance.tolist(), strict=True)):
            while accepted[request] < length and self.rng.random() < chance:
                accepted[request] += 1
            if self.turns.random() < self.change:
                self.chance[request] = sum(CHANCES) - chance
        return accepted


class Chains(Device):
    """A device whose requests have chains; their text changes after so many steps, `lasting`."""

    lasting = LASTING[0]

    def _decode(self, budget: DeviceBudget, times: PhaseTimes, requests: int, rng: random.Random) -> float:
        greedy, texts = np.ones(requests, dtype=bool), Texts(requests, self.lasting)
        values = np.zeros((requests, LONGEST))
        tokens, began = 0, 0.0
        for step in range(STEPS):
            if step == WARM:
                tokens, began = 0, self.now
            lengths = likeliest(values, budget.nodes or 0)
            rows = requests + int(lengths.sum())
            with times.phase("verify"):
                self.now += self.verify(rows)
            accepted = texts.step(lengths)
            tokens += requests + int(accepted.sum())
            if lengths.any():
                chains = chains_of(np.where(np.arange(LONGEST) < lengths[:, None], values, 0.0))
                nodes = torch.arange(LONGEST + 1).expand(requests, -1)
                nodes = nodes.where(nodes < torch.from_numpy(accepted)[:, None], -1)
                budget.verified(chains, Accepted(nodes, nodes), greedy, None)
            with times.phase("draft"):
                levels = min(LONGEST, budget.begin_step(greedy))
                self.levels.append(levels)
                values = texts.chance[:, None] ** np.arange(1, 1 + LONGEST) * (np.arange(LONGEST) < levels)
                if levels:
                    self.now += self.level(requests)
                    with times.phase("grow"):
                        self.now += (levels - 1) * self.level(requests)
                    budget.drafted(chains_of(values), greedy, None)
                forwards = max(levels - 1, 0)
                budget.end_step(requests, rows, 0, forwards, prefills=False, missed=False, trees=levels > 0)
            times.take()
        return tokens / (self.now - began)

    def fixed(self, length: int, requests: int) -> float:
        """Tokens per second of chains of one length, relative to no drafts."""
        texts, tokens = Texts(requests, self.lasting), 0
        lengths = np.full(requests, length)
        for step in range(STEPS):
            accepted = texts.step(lengths)
            tokens += requests + int(accepted.sum()) if step >= WARM else 0
        seconds = self.verify(requests * (1 + length)) + length * self.level(requests)
        return tokens / ((STEPS - WARM) * seconds) / (requests / self.verify(requests))


def likeliest(values: np.ndarray, most: int) -> np.ndarray:
    """Length of each chain [R], if of their nodes [R, L] at most so many are kept: those of the largest values."""
    order = np.argsort(-values, axis=None, kind="stable")[:most]
    kept = np.zeros(values.size, dtype=bool)
    kept[order] = values.reshape(-1)[order] > 0
    lengths: np.ndarray = kept.reshape(values.shape).sum(1)
    return lengths


def chains_of(values: np.ndarray) -> TreeBatch:
    """Chains whose nodes have these values [R, L]; 0: no node."""
    there = torch.from_numpy(values > 0)
    depth = torch.arange(1, 1 + values.shape[1]).expand(values.shape).where(there, 0)
    return TreeBatch(depth, (depth - 2).where(there, -1), depth, torch.from_numpy(values).log())


MODELS: dict[str, Callable[[int], float]] = {"draft": draft, "module": lambda requests: 0.0004}
"""Seconds of a level."""


def rates(level: Callable[[int], float], lasting: int, requests: int) -> dict[str, Any]:
    """Relative to no drafts."""
    device = Chains(dense, level)
    device.lasting = lasting
    fixed = {str(length): round(device.fixed(length, requests), 3) for length in FIXED}
    return {"fixed": fixed, "adaptive": round(device.rate(requests, device.told(dense, level)), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for (name, level), lasting, requests in itertools.product(MODELS.items(), LASTING, REQUESTS):
        rows.append({"draft": name, "lasting": lasting, "requests": requests, **rates(level, lasting, requests)})
        print(rows[-1], flush=True)
    if options.out is not None:
        save(options.out, rows)


if __name__ == "__main__":
    main()
