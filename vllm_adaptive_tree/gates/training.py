"""Training of gates: seconds of Adam on previously collected examples."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_adaptive_tree.proposers.gate import Gate

HELD_OUT = 0.05
STEPS_PER_EPOCH, MIN_BATCH = 200, 20
C2T_THRESHOLD, MCSD_THRESHOLD = 0.5, 0.4  # the defaults of `beta` and `stop_threshold`
BALANCE = 2.0
"""Weight of all negatives relative to all positives for C2T, whatever their numbers: it calibrates the confidence."""
MAX_LOSS_RATIO = 0.99
"""Ratio to the best constant's loss below which a gate has learnt something."""


class GateRecipe(NamedTuple):
    rate: float  # of Adam
    decay: float  # of the rate, when the held-out loss has not improved for `plateau` epochs
    plateau: int  # 0: decay after every epoch
    patience: int  # training ends after this many epochs without a better held-out loss
    epochs: int  # upper bound
    batch: int  # upper bound: smaller for a small collection, so that an epoch has STEPS_PER_EPOCH of them


C2T = GateRecipe(1e-3, 0.5, 5, 12, 200, 1024)
C2T_FINE_TUNING = C2T._replace(rate=1e-4)
MCSD = GateRecipe(1e-3, 0.5, 0, 10, 10, 200)  # the paper's batch is 20; the losses are the same


class Score(NamedTuple):
    """The effect of a threshold on examples."""

    recall: float  # fraction of the positives at or above the threshold
    positive_rate: float  # fraction of all examples at or above it


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
    alive: list[tuple[int, int]]  # per hidden layer: units activated by held-out examples, and all units

    @property
    def failed(self) -> str | None:
        """Reason why nothing was learnt, or None."""
        if not all(units for units, _ in self.alive):
            return "all units of a layer are dead"
        return None if self.best.loss < MAX_LOSS_RATIO * self.constant else "no better than a constant"


Watch = Callable[[int, Epoch], object]
"""Callback for the seed and every epoch."""


def ignore(seed: int, epoch: Epoch) -> None: ...


class Trained(NamedTuple):
    run: Run  # the successful run with the smallest held-out loss
    runs: list[Run]
    confidence: Tensor  # of `run.best`, held out
    label: Tensor

    @property
    def best(self) -> Epoch:
        return self.run.best


class Data(NamedTuple):
    """Features [M, F], labels [M], and example weights [M]."""

    features: Tensor
    label: Tensor
    weight: Tensor


def new_gate(inputs: int, *hidden: int, seed: int = 0, features: str = "paper") -> Gate:
    """An untrained gate, deterministic per seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gate(inputs, *hidden, features=features)


def train_c2t(
    columns: dict[str, Tensor],
    *,
    begin: Callable[[int], Gate],
    negatives: float,
    recipe: GateRecipe = C2T,
    seeds: Sequence[int] = (0,),
    watch: Watch = ignore,
) -> Trained:
    """Train C2T's classifier (arXiv 2502.13652) from every seed until the held-out loss stops improving; keep the best.

    Args:
        columns: `features`, `label`, and the `prompt` of each example.
        begin: seed -> the initial gate.
        negatives: number to keep per positive for training; their total weight is `BALANCE`. All held-out examples
            are kept.

    Raises:
        ValueError: there are too few examples, or no seed learnt anything.
    """
    features, label, held = _finite(columns)
    tested = Data(features[held], label[held], balanced(label[held]))

    def train(seed: int) -> Run:
        index = (~held).nonzero()[:, 0]
        index = index[subsample(label[index], negatives=negatives, seed=seed)]
        data = Data(features[index], label[index], balanced(label[index]))
        return _train(begin(seed), data, tested, threshold=C2T_THRESHOLD, recipe=recipe, watch=watch, seed=seed)

    return _best([train(seed) for seed in seeds], tested)


def train_mcsd(
    columns: dict[str, Tensor],
    *,
    begin: Callable[[int], Gate],
    balance: bool,
    recipe: GateRecipe = MCSD,
    seeds: Sequence[int] = (0,),
    watch: Watch = ignore,
) -> Trained:
    """Train a decision model of MCSD (arXiv 2409.10644); arguments as for `train_c2t`.

    `balance`: use as many positives as negatives, also held out; not for soft labels.
    """
    features, label, held = _finite(columns)
    if balance:
        index = torch.cat([side[subsample(label[side], negatives=1, positives=1, seed=0)] for side in _sides(held)])
        features, label, held = features[index], label[index], held[index]
    data, tested = (Data(features[side], label[side], torch.ones_like(label[side])) for side in (~held, held))
    runs = [
        _train(begin(seed), data, tested, threshold=MCSD_THRESHOLD, recipe=recipe, watch=watch, seed=seed)
        for seed in seeds
    ]
    return _best(runs, tested)


def balanced(label: Tensor) -> Tensor:
    """Example weights [M] that make the negatives count `BALANCE` times as much as the positives.

    Raises:
        ValueError: one of the two classes is missing.
    """
    positive = label > 0.5
    counts = int(positive.sum()), int((~positive).sum())
    _both(counts)
    return torch.where(positive, 1.0, BALANCE * counts[0] / counts[1])


def held_out(prompt: Tensor) -> Tensor:
    """The held-out examples, [M] bool: those of one prompt in twenty, at least one, the same for every seed.

    No prompt is on both sides.

    Raises:
        ValueError: there is only one prompt.
    """
    prompts = prompt.unique()
    if len(prompts) < 2:
        raise ValueError("a gate needs the examples of two prompts at least: those of one are held out; give more")
    count = max(1, round(HELD_OUT * len(prompts)))
    order = torch.randperm(len(prompts), generator=_random(0))
    return torch.isin(prompt, prompts[order[:count]])


def subsample(label: Tensor, *, negatives: float, positives: float = math.inf, seed: int) -> Tensor:
    """Indices [K], ascending: at most `negatives` negatives per positive, and `positives` positives per negative.

    Raises:
        ValueError: one of the two classes is missing.
    """
    classes = [(label > 0.5).nonzero()[:, 0], (label <= 0.5).nonzero()[:, 0]]
    counts = [len(index) for index in classes]
    _both(counts)
    most = (positives * counts[1], negatives * counts[0])
    random = _random(seed)
    kept = [
        index[torch.randperm(len(index), generator=random)[: min(len(index), max(1, round(limit)))]]
        if limit < len(index)
        else index
        for index, limit in zip(classes, most, strict=True)
    ]
    return torch.cat(kept).sort().values


def score(confidence: Tensor, label: Tensor, threshold: float) -> Score:
    """Effect of `threshold` on examples. `label` [M] in [0, 1]; a soft label counts as that fraction of a positive."""
    passes = (confidence >= threshold).float()
    return Score(float((passes * label).sum() / label.sum().clamp(min=1e-9)), float(passes.mean()))


def _both(counts: Sequence[int]) -> None:
    if not all(counts):
        raise ValueError(
            f"{counts[0]} positive and {counts[1]} negative examples: both are needed. Collect more, and look whether "
            "draft and target belong together"
        )


def _finite(columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Features [M, F], labels [M] and the held-out mask [M], without non-finite rows."""
    good = columns["features"].isfinite().all(1) & columns["label"].isfinite()
    features, label, prompt = (columns[name][good] for name in ("features", "label", "prompt"))
    return features, label, held_out(prompt)


def _sides(held: Tensor) -> list[Tensor]:
    return [side.nonzero()[:, 0] for side in (held, ~held)]


def _train(
    gate: Gate, data: Data, tested: Data, *, threshold: float, recipe: GateRecipe, watch: Watch, seed: int
) -> Run:
    """Train a copy of `gate` until the loss on `tested` stops improving; record its state before and after every epoch.

    Adam sees standardised features; the recorded gates take raw ones.
    """
    mean, deviation = data.features.mean(0), data.features.std(0).clamp(min=1e-6)
    learner = copy.deepcopy(gate).requires_grad_(requires_grad=True)
    _fold_affine(learner, shift=mean, scale=deviation)
    optimizer = torch.optim.Adam(learner.parameters(), lr=recipe.rate)
    inputs, random = (data.features - mean) / deviation, _random(seed)
    epochs: list[Epoch] = []
    size = max(MIN_BATCH, min(recipe.batch, len(inputs) // STEPS_PER_EPOCH))
    best = 0  # number of the epoch
    for number in range(recipe.epochs + 1):
        if number:
            for batch in torch.randperm(len(inputs), generator=random).split(size):
                loss = F.binary_cross_entropy(learner(inputs[batch]), data.label[batch], weight=data.weight[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        state = copy.deepcopy(learner).requires_grad_(requires_grad=False)
        _fold_affine(state, shift=-mean / deviation, scale=1 / deviation)
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
    run = min(learnt, key=lambda candidate: candidate.best.loss)
    return Trained(run, runs, run.best.gate(tested.features), tested.label)


def _loss(confidence: Tensor, data: Data) -> float:
    """Weighted binary cross-entropy."""
    loss = F.binary_cross_entropy(confidence, data.label, weight=data.weight, reduction="sum")
    return float(loss / data.weight.sum())


def alive_units(gate: Gate, features: Tensor) -> list[tuple[int, int]]:
    """Number of units that these features [M, F] activate, and number of all units, per hidden layer."""
    alive, out = [], features.float()
    for layer in list(gate.layers)[:-1]:
        out = layer(out)
        if isinstance(layer, nn.ReLU):
            alive.append((int((out > 0).any(0).sum()), out.shape[1]))
    return alive


def _fold_affine(gate: Gate, *, shift: Tensor, scale: Tensor) -> None:
    """Fold an affine map into the first layer: afterwards gate(x) is the old gate(scale * x + shift)."""
    first = gate.layers[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias.add_(first.weight @ shift)
        first.weight.mul_(scale)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
