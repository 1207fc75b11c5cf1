"""Training of the small models: seconds of Adam on examples that were collected before."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_adaptive_tree.proposers.gate import Gate

HELD_OUT = 0.05
STEPS, LEAST = 200, 20  # of an epoch; examples of a step
C2T_THRESHOLD, MCSD_THRESHOLD = 0.5, 0.4  # the defaults of `beta` and `stop_threshold`
BALANCE = 2.0
"""Negatives that count for each positive of C2T's, however many are there: what a confidence means."""
NO_BETTER = 0.99
"""Share of a constant's loss that a gate must stay below to have learnt anything."""


class Recipe(NamedTuple):
    rate: float  # of Adam
    decay: float  # of the rate, whenever the held-out loss has not fallen for `plateau` epochs
    plateau: int  # 0: in every epoch
    patience: int  # epochs without a smaller held-out loss after which training ends
    epochs: int  # at most
    batch: int  # at most: a small collection is cut so that an epoch has STEPS of them


C2T = Recipe(1e-3, 0.5, 5, 12, 200, 1024)
C2T_FINE_TUNING = C2T._replace(rate=1e-4)
MCSD = Recipe(1e-3, 0.5, 0, 10, 10, 200)  # the paper's batch is 20; losses came out the same


class Score(NamedTuple):
    """What a threshold does to examples."""

    recall: float  # share of the positive labels that reaches it
    positive_rate: float  # share of the examples that reaches it


class Epoch(NamedTuple):
    number: int  # 0: before training
    loss: float  # binary cross-entropy, held out
    score: Score  # held out
    gate: Gate


class Run(NamedTuple):
    """A training from one seed."""

    seed: int
    epochs: list[Epoch]
    best: Epoch  # by held-out loss
    constant: float  # held-out loss of the best constant prediction
    alive: list[tuple[int, int]]  # of each hidden layer: units that held-out examples move, and all

    @property
    def failed(self) -> str | None:
        """Why nothing was learnt; None: something was."""
        if not all(units for units, _ in self.alive):
            return "all units of a layer are dead"
        return None if self.best.loss < NO_BETTER * self.constant else "no better than a constant"


Watch = Callable[[int, Epoch], object]
"""Is told the seed and every epoch."""


def ignore(seed: int, epoch: Epoch) -> None: ...


class Trained(NamedTuple):
    run: Run  # of those that did not fail, the one with the smallest held-out loss
    runs: list[Run]
    confidence: Tensor  # of `run.best`, held out
    label: Tensor

    @property
    def best(self) -> Epoch:
        return self.run.best


class Data(NamedTuple):
    """Features [M, F], labels [M], and how much each example counts [M]."""

    features: Tensor
    label: Tensor
    weight: Tensor


def fresh(inputs: int, *hidden: int, seed: int = 0, features: str = "paper") -> Gate:
    """An untrained gate, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gate(inputs, *hidden, features=features)


def train_c2t(
    columns: dict[str, Tensor],
    *,
    begin: Callable[[int], Gate],
    negatives: float,
    recipe: Recipe = C2T,
    seeds: Sequence[int] = (0,),
    watch: Watch = ignore,
) -> Trained:
    """C2T's classifier (arXiv 2502.13652), from every seed until its held-out loss falls no more; the best is taken.

    Args:
        columns: `features`, `label`, and the `prompt` of each example.
        begin: the gate that a seed starts from.
        negatives: kept for every positive to learn from; together they count as `BALANCE`. Held-out examples are all
            kept.

    Raises:
        ValueError: there is nothing to learn from, or no seed learnt anything.
    """
    features, label, held = _finite(columns)
    tested = Data(features[held], label[held], balanced(label[held]))

    def learnt(seed: int) -> Run:
        places = (~held).nonzero()[:, 0]
        places = places[thinned(label[places], negatives=negatives, seed=seed)]
        data = Data(features[places], label[places], balanced(label[places]))
        return _train(begin(seed), data, tested, threshold=C2T_THRESHOLD, recipe=recipe, watch=watch, seed=seed)

    return _best([learnt(seed) for seed in seeds], tested)


def train_mcsd(
    columns: dict[str, Tensor],
    *,
    begin: Callable[[int], Gate],
    balance: bool,
    recipe: Recipe = MCSD,
    seeds: Sequence[int] = (0,),
    watch: Watch = ignore,
) -> Trained:
    """A decision model of MCSD (arXiv 2409.10744), as `train_c2t`. `balance`: as many positives as negatives, held out
    too; not for soft labels."""
    features, label, held = _finite(columns)
    if balance:
        places = torch.cat([side[thinned(label[side], negatives=1, positives=1, seed=0)] for side in _sides(held)])
        features, label, held = features[places], label[places], held[places]
    data, tested = (Data(features[side], label[side], torch.ones_like(label[side])) for side in (~held, held))
    runs = [
        _train(begin(seed), data, tested, threshold=MCSD_THRESHOLD, recipe=recipe, watch=watch, seed=seed)
        for seed in seeds
    ]
    return _best(runs, tested)


def balanced(label: Tensor) -> Tensor:
    """Weights [M] of examples by which the negatives count for `BALANCE` times the positives.

    Raises:
        ValueError: one of the two classes is missing.
    """
    positive = label > 0.5
    counts = int(positive.sum()), int((~positive).sum())
    _both(counts)
    return torch.where(positive, 1.0, BALANCE * counts[0] / counts[1])


def held_out(prompt: Tensor) -> Tensor:
    """[M] bool: the examples of one prompt in twenty, but of one at least, the same for every seed. No text stands on
    both sides.

    Raises:
        ValueError: there is one prompt only.
    """
    prompts = prompt.unique()
    if len(prompts) < 2:
        raise ValueError("a gate needs the examples of two prompts at least: those of one are held out; give more")
    count = max(1, round(HELD_OUT * len(prompts)))
    order = torch.randperm(len(prompts), generator=_random(0))
    return torch.isin(prompt, prompts[order[:count]])


def thinned(label: Tensor, *, negatives: float, positives: float = math.inf, seed: int) -> Tensor:
    """Places [K] in rising order: at most so many negatives for each positive, and positives for each negative.

    Raises:
        ValueError: one of the two classes is missing.
    """
    classes = [(label > 0.5).nonzero()[:, 0], (label <= 0.5).nonzero()[:, 0]]
    counts = [len(places) for places in classes]
    _both(counts)
    most = (positives * counts[1], negatives * counts[0])
    random = _random(seed)
    kept = [
        places[torch.randperm(len(places), generator=random)[: min(len(places), max(1, round(limit)))]]
        if limit < len(places)
        else places
        for places, limit in zip(classes, most, strict=True)
    ]
    return torch.cat(kept).sort().values


def score(confidence: Tensor, label: Tensor, threshold: float) -> Score:
    """`label` [M] from 0 to 1; soft ones count as so much of a positive."""
    passes = (confidence >= threshold).float()
    return Score(float((passes * label).sum() / label.sum().clamp(min=1e-9)), float(passes.mean()))


def _both(counts: Sequence[int]) -> None:
    if not all(counts):
        raise ValueError(
            f"{counts[0]} positive and {counts[1]} negative examples: both are needed. Collect more, and look whether "
            "draft and target belong together"
        )


def _finite(columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Features [M, F], labels [M] and which of them are held out, without rows that are not numbers."""
    good = columns["features"].isfinite().all(1) & columns["label"].isfinite()
    features, label, prompt = (columns[name][good] for name in ("features", "label", "prompt"))
    return features, label, held_out(prompt)


def _sides(held: Tensor) -> list[Tensor]:
    return [side.nonzero()[:, 0] for side in (held, ~held)]


def _train(gate: Gate, data: Data, tested: Data, *, threshold: float, recipe: Recipe, watch: Watch, seed: int) -> Run:
    """Train a copy of `gate`: its state before and after every epoch, until the loss on `tested` falls no more.

    Adam works on standardised features; what is handed out reads them as they come.
    """
    mean, deviation = data.features.mean(0), data.features.std(0).clamp(min=1e-6)
    learner = copy.deepcopy(gate).requires_grad_(requires_grad=True)
    _read(learner, shift=mean, scale=deviation)
    optimizer = torch.optim.Adam(learner.parameters(), lr=recipe.rate)
    inputs, random = (data.features - mean) / deviation, _random(seed)
    epochs: list[Epoch] = []
    size = max(LEAST, min(recipe.batch, len(inputs) // STEPS))
    best = 0  # number of the epoch
    for number in range(recipe.epochs + 1):
        if number:
            for batch in torch.randperm(len(inputs), generator=random).split(size):
                loss = F.binary_cross_entropy(learner(inputs[batch]), data.label[batch], weight=data.weight[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        state = copy.deepcopy(learner).requires_grad_(requires_grad=False)
        _read(state, shift=-mean / deviation, scale=1 / deviation)
        confidence = state(tested.features)
        epochs.append(Epoch(number, _loss(confidence, tested), score(confidence, tested.label, threshold), state))
        watch(seed, epochs[-1])
        if epochs[-1].loss < epochs[best].loss:
            best = number
        stale = number - best
        if stale >= recipe.patience:
            break
        if number and (recipe.plateau == 0 or (stale and stale % recipe.plateau == 0)):
            for group in optimizer.param_groups:
                group["lr"] *= recipe.decay
    mean_label = (tested.weight * tested.label).sum() / tested.weight.sum()
    constant = _loss(mean_label.expand_as(tested.label), tested)
    return Run(seed, epochs, epochs[best], constant, alive_units(epochs[best].gate, tested.features))


def _best(runs: list[Run], tested: Data) -> Trained:
    learnt = [run for run in runs if run.failed is None]
    if not learnt:
        why = "; ".join(
            f"seed {run.seed}: held-out loss {run.best.loss:.4f}, a constant's {run.constant:.4f}, {run.failed}"
            for run in runs
        )
        raise ValueError(f"no gate has learnt anything ({why}); collect more prompts, or try more seeds")
    run = min(learnt, key=lambda one: one.best.loss)
    return Trained(run, runs, run.best.gate(tested.features), tested.label)


def _loss(confidence: Tensor, data: Data) -> float:
    """Binary cross-entropy; an example counts by its weight."""
    loss = F.binary_cross_entropy(confidence, data.label, weight=data.weight, reduction="sum")
    return float(loss / data.weight.sum())


def alive_units(gate: Gate, features: Tensor) -> list[tuple[int, int]]:
    """Of each hidden layer: how many units these features [M, F] switch on, and all."""
    found, out = [], features.float()
    for layer in list(gate.layers)[:-1]:
        out = layer(out)
        if isinstance(layer, nn.ReLU):
            found.append((int((out > 0).any(0).sum()), out.shape[1]))
    return found


def _read(gate: Gate, *, shift: Tensor, scale: Tensor) -> None:
    """Change the first layer so that the gate says of x what it said of scale * x + shift."""
    first = gate.layers[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias.add_(first.weight @ shift)
        first.weight.mul_(scale)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
