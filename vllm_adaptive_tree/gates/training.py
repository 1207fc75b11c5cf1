"""Training of the small models: seconds of Adam on examples that were collected before."""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_adaptive_tree.gates.mlp import Gate

HELD_OUT = 0.05
STEPS, LEAST = 200, 20  # of an epoch; examples of a step
C2T_THRESHOLD, MCSD_THRESHOLD = 0.5, 0.4  # the defaults of `beta` and `stop_threshold`


class Recipe(NamedTuple):
    rate: float  # of Adam
    decay: float  # of the rate, per epoch
    epochs: int
    batch: int  # at most: a small collection is cut so that an epoch has STEPS of them


C2T = Recipe(1e-3, 1.0, 10, 1024)
C2T_FINE_TUNING = C2T._replace(rate=1e-4)
MCSD = Recipe(1e-3, 0.5, 10, 200)  # the paper's batch is 20; losses came out the same


class Score(NamedTuple):
    """What a threshold does to examples."""

    recall: float  # share of the positive labels that reaches it
    positive_rate: float  # share of the examples that reaches it


class Epoch(NamedTuple):
    number: int  # 0: before training
    loss: float  # binary cross-entropy, held out
    score: Score  # held out
    gate: Gate


Watch = Callable[[Epoch], object]


def ignore(epoch: Epoch) -> None: ...


class Trained(NamedTuple):
    best: Epoch
    epochs: list[Epoch]
    confidence: Tensor  # of `best`, held out
    label: Tensor


def fresh(inputs: int, *hidden: int, seed: int = 0) -> Gate:
    """An untrained gate, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gate(inputs, *hidden)


def train_c2t(
    columns: dict[str, Tensor],
    *,
    gate: Gate,
    negatives: float,
    recipe: Recipe = C2T,
    watch: Watch = ignore,
    seed: int = 0,
) -> Trained:
    """C2T's classifier (arXiv 2502.13652): of the epochs the one with the highest recall at 0.5, then with the smaller
    positive rate; of the second half, for the first epochs of a small collection let everything pass.

    `negatives`: kept for every positive; held-out examples are all kept.
    """
    features, label, held = _finite(columns, seed)
    places = (~held).nonzero()[:, 0]
    places = places[thinned(label[places], negatives=negatives, seed=seed)]
    epochs = _train(gate, features, label, places, held, threshold=C2T_THRESHOLD, recipe=recipe, watch=watch, seed=seed)
    best = max(epochs[1 + recipe.epochs // 2 :], key=lambda epoch: (epoch.score.recall, -epoch.score.positive_rate))
    return Trained(best, epochs, best.gate(features[held]), label[held])


def train_mcsd(
    columns: dict[str, Tensor],
    *,
    gate: Gate,
    balance: bool,
    recipe: Recipe = MCSD,
    watch: Watch = ignore,
    seed: int = 0,
) -> Trained:
    """A decision model of MCSD (arXiv 2409.10744): of the epochs the one with the smallest held-out loss. `balance`:
    as many positives as negatives, held out too; not for soft labels."""
    features, label, held = _finite(columns, seed)
    if balance:
        places = torch.cat([side[thinned(label[side], negatives=1, positives=1, seed=seed)] for side in _sides(held)])
        features, label, held = features[places], label[places], held[places]
    places = (~held).nonzero()[:, 0]
    epochs = _train(
        gate, features, label, places, held, threshold=MCSD_THRESHOLD, recipe=recipe, watch=watch, seed=seed
    )
    best = min(epochs[1:], key=lambda epoch: epoch.loss)
    return Trained(best, epochs, best.gate(features[held]), label[held])


def held_out(prompt: Tensor, seed: int) -> Tensor:
    """[M] bool: the examples of one prompt in twenty, but of one at least. No text stands on both sides.

    Raises:
        ValueError: there is one prompt only.
    """
    prompts = prompt.unique()
    if len(prompts) < 2:
        raise ValueError("a gate needs the examples of two prompts at least: those of one are held out; give more")
    count = max(1, round(HELD_OUT * len(prompts)))
    order = torch.randperm(len(prompts), generator=_random(seed))
    return torch.isin(prompt, prompts[order[:count]])


def thinned(label: Tensor, *, negatives: float, positives: float = math.inf, seed: int) -> Tensor:
    """Places [K] in rising order: at most so many negatives for each positive, and positives for each negative.

    Raises:
        ValueError: one of the two classes is missing.
    """
    classes = [(label > 0.5).nonzero()[:, 0], (label <= 0.5).nonzero()[:, 0]]
    counts = [len(places) for places in classes]
    if not all(counts):
        raise ValueError(
            f"{counts[0]} positive and {counts[1]} negative examples: both are needed. Collect more, and look whether "
            "draft and target belong together"
        )
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


def _finite(columns: dict[str, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [M, F], labels [M] and which of them are held out, without rows that are not numbers."""
    good = columns["features"].isfinite().all(1) & columns["label"].isfinite()
    features, label, prompt = (columns[name][good] for name in ("features", "label", "prompt"))
    return features, label, held_out(prompt, seed)


def _sides(held: Tensor) -> list[Tensor]:
    return [side.nonzero()[:, 0] for side in (held, ~held)]


def _train(
    gate: Gate,
    every_feature: Tensor,
    every_label: Tensor,
    places: Tensor,
    held: Tensor,
    *,
    threshold: float,
    recipe: Recipe,
    watch: Watch,
    seed: int,
) -> list[Epoch]:
    """Train a copy of `gate` on the examples at `places`: its state before and after every epoch.

    Adam works on standardised features; what is handed out reads them as they come.
    """
    features, label = every_feature[places], every_label[places]
    tested = every_feature[held], every_label[held]
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
    learner = copy.deepcopy(gate).requires_grad_(requires_grad=True)
    _read(learner, shift=mean, scale=deviation)
    optimizer = torch.optim.Adam(learner.parameters(), lr=recipe.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, recipe.decay)
    inputs, random = (features - mean) / deviation, _random(seed)
    epochs: list[Epoch] = []
    size = max(LEAST, min(recipe.batch, len(label) // STEPS))
    for number in range(recipe.epochs + 1):
        if number:
            for batch in torch.randperm(len(label), generator=random).split(size):
                loss = F.binary_cross_entropy(learner(inputs[batch]), label[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
        state = copy.deepcopy(learner).requires_grad_(requires_grad=False)
        _read(state, shift=-mean / deviation, scale=1 / deviation)
        confidence = state(tested[0])
        loss = F.binary_cross_entropy(confidence, tested[1])
        epochs.append(Epoch(number, float(loss), score(confidence, tested[1], threshold), state))
        watch(epochs[-1])
    return epochs


def _read(gate: Gate, *, shift: Tensor, scale: Tensor) -> None:
    """Change the first layer so that the gate says of x what it said of scale * x + shift."""
    first = gate.layers[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias.add_(first.weight @ shift)
        first.weight.mul_(scale)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
