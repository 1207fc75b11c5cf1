"""Training of a head on its target's distributions; an EAGLE-3 head is unrolled as it drafts (training-time test)."""

import io
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_adaptive_tree.files import atomic_write
from vllm_adaptive_tree.heads.eagle3 import Head
from vllm_adaptive_tree.heads.muon import Muon
from vllm_adaptive_tree.heads.observations import Law, Observation, Observations, Observer

DEPTH_WEIGHT = 0.8  # of the loss of a step, relative to the step before
WARM_UP, LAST_RATE = 20, 0.02  # steps; of the peak rate, at the end
ADAM_RATE = 0.3  # relative to Muon's
REPORT_EVERY, SAVE_EVERY = 30.0, 60.0  # seconds
CHECKS, CHECKED = 5, 6  # of the held-out loss, in a training; batches of one, at most


class HeadRecipe(NamedTuple):
    minutes: float  # of steps alone
    unrolled: int = 4  # steps; of a one-forward head: depths
    batch: int = 8  # windows
    window: int = 256  # tokens
    rate: float = 1e-2  # of Muon; cosine
    bfloat16: bool = True
    compiled: bool = False


class Report(NamedTuple):
    """A point of the training's curve."""

    minutes: float
    steps: int
    loss: float  # per row and step of the unrolling, weighted by DEPTH_WEIGHT; nats
    agreement: list[float]  # by depth: share of rows at which head and target prefer the same token
    tokens_per_second: float
    held_out: bool


class Lesson(NamedTuple):
    """Target's outputs for a batch; row t is about the token t + 2."""

    law: Law  # [B, T - 1]
    auxiliary: Tensor  # [B, T - 1, A * H], row t: of token t
    embedded: Tensor  # [B, T - 1, H], row t: of token t + 1


class Teacher:
    """Frozen Llama-like target of transformers, which gives lessons for a head.

    Args:
        layers: the target's layers whose inputs the head reads.
        draft_ids: [D] int64, the ids of the head's own vocabulary; None: it is the target's.
    """

    def __init__(self, target: Any, layers: Sequence[int], draft_ids: Tensor | None = None):
        self.observe = Observer(target, layers, draft_ids)
        self.target, self.draft_ids = self.observe.target, draft_ids

    def __call__(self, tokens: Tensor, seen: Observation | None = None) -> Lesson:
        """Lesson of `tokens` [B, T]; `seen`: the target's observation of them, if there is one."""
        law, auxiliary = self.observe(tokens) if seen is None else seen
        embedded = self.target.model.embed_tokens(tokens[:, 1:])
        return Lesson(law.at(slice(1, None)), auxiliary[:, :-1].to(embedded.dtype), embedded)

    def output(self, head: Head) -> Tensor:
        """Output matrix of `head`, [V or D, H]."""
        return self.target.lm_head.weight if head.lm_head is None else head.lm_head.weight

    def initialise(self, head: Head) -> None:
        """Initialise as the target's last layer over the last auxiliary state, with the token's embedding beside it."""
        last, width = self.target.model.layers[-1], head.norm.weight.shape[0]
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(last.self_attn, name).weight / math.sqrt(2)
                getattr(head.midlayer.self_attn, name).weight.copy_(torch.cat([weight, weight], 1))
            head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(head.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
            for norm in (head.midlayer.input_layernorm, head.midlayer.hidden_norm):
                norm.weight.copy_(last.input_layernorm.weight)
            head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            head.norm.weight.copy_(self.target.model.norm.weight)
            head.fc.weight.zero_()
            head.fc.weight[:, -width:].copy_(torch.eye(width))
            if head.lm_head is not None:
                head.lm_head.weight.copy_(self.target.lm_head.weight[self.draft_ids])

    def loss(self, head: Head, lesson: Lesson, steps: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the target's distributions over `steps` unrolled steps, and agreement by depth [steps]."""
        total, agreement = torch.zeros(()), []
        for step, normed in enumerate(head(lesson.auxiliary, lesson.embedded, steps)):
            logits, law = F.linear(normed[:, step:], self.output(head)), lesson.law.at(slice(step, None))
            total = total + DEPTH_WEIGHT**step * law.cross_entropy(logits)
            best = logits.argmax(-1)
            if self.draft_ids is not None:
                best = self.draft_ids[best]
            agreement.append((best == law.best).float().mean())
        return total / sum(DEPTH_WEIGHT**step for step in range(steps)), torch.stack(agreement)


class Teaches(Protocol):
    """Interface of teachers: `Teacher` for EAGLE-3 heads, `BlockTeacher` for one-forward heads, `LayersTeacher`."""

    observe: Observer

    def __call__(self, tokens: Tensor, seen: Observation | None = None) -> Any: ...
    def loss(self, head: Any, lesson: Any, steps: int) -> tuple[Tensor, Tensor]: ...


class Training:
    """Training that can be saved and resumed.

    Args:
        tokens, held_out: flat texts; they are read in windows, in another order in every epoch.
        folder: keeps what the target says of them; None: it is asked in every epoch.
    """

    def __init__(
        self,
        head: nn.Module,
        teacher: Teaches,
        tokens: Tensor,
        held_out: Tensor,
        recipe: HeadRecipe,
        folder: Path | None = None,
    ):
        self.head, self.teacher, self.recipe = head, teacher, recipe
        self.windows = len(tokens) // recipe.window
        count = min(len(held_out) // recipe.window, CHECKED * recipe.batch)
        starts = torch.linspace(0, len(held_out) - recipe.window, count).long()
        self.held_out = self.windows + torch.arange(count)  # numbers of windows
        checked = held_out[starts[:, None] + torch.arange(recipe.window)]
        first = tokens[: self.windows * recipe.window].view(-1, recipe.window)
        self.observations = Observations(teacher.observe, torch.cat([first, checked]), folder)
        learnt = {name: p for name, p in head.named_parameters() if p.requires_grad}
        matrices, outer = list[Tensor](), list[Tensor]()
        for name, p in learnt.items():
            inner = p.ndim == 2 and "lm_head" not in name and "markov" not in name
            (matrices if inner else outer).append(p)
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=1.0, weight_decay=0.1),
            torch.optim.AdamW(outer, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.steps, self.seconds = 0, 0.0
        self.curve: list[Report] = []
        self.checked, self.best = 0.0, math.inf  # when, in seconds, and the least loss of `curve`

    def run(
        self,
        *,
        save: Path | None = None,
        watch: Callable[[Report], object],
        keep: Callable[[Report], object] = lambda best: None,
    ) -> None:
        """Train until `recipe.minutes` of steps are over; neither compilation nor held-out checks count.

        Args:
            save: a file for the state; written regularly, when interrupted, and at the end.
            keep: called when the head is better than at all checks before; also when interrupted.
        """
        recipe, learn = self.recipe, self.teacher.loss
        if recipe.compiled:
            learn = torch.compile(learn)
        compiles, whole = recipe.compiled, 60 * recipe.minutes
        reported = saved = self.seconds
        losses: list[Tensor] = []
        agreements: list[Tensor] = []
        try:
            while self.seconds < whole:
                begun = time.monotonic()
                with self._precision():
                    lesson = self.teacher(*self.observations(self._drawn()))
                    loss, agreement = learn(self.head, lesson, recipe.unrolled)
                loss.backward()
                self._update(self.seconds / whole)
                losses.append(loss.detach())
                agreements.append(agreement)
                if not compiles:
                    self.seconds += time.monotonic() - begun
                compiles = False
                if self.seconds - reported > REPORT_EVERY:
                    rate = len(losses) * recipe.batch * recipe.window / (self.seconds - reported)
                    watch(report := self._report(losses, agreements, rate, held_out=False))
                    if not math.isfinite(report.loss):
                        raise ValueError(f"the loss is {report.loss} at step {self.steps}: give a smaller --rate")
                    losses, agreements, reported = [], [], self.seconds
                parts = [int(CHECKS * seconds / whole) for seconds in (self.checked, self.seconds)]
                if parts[0] < parts[1] < CHECKS:
                    self._check_best(watch, keep)
                if save is not None and self.seconds - saved > SAVE_EVERY:
                    self.save(save)
                    saved = self.seconds
        except KeyboardInterrupt:
            if save is not None:
                self.save(save)
            if self.steps:
                self._check_best(watch, keep)
                if save is not None:
                    self.save(save)  # once more: which head is the best
            raise
        self._check_best(watch, keep)
        if not math.isfinite(self.best):
            raise ValueError(f"the held-out loss is {self.curve[-1].loss} at step {self.steps}: give a smaller --rate")
        if save is not None:
            self.save(save)

    def _check_best(self, watch: Callable[[Report], object], keep: Callable[[Report], object]) -> None:
        watch(report := self.check())
        self.checked = self.seconds
        if report.loss < self.best:
            keep(report)  # first: what interrupts it is not kept
            self.best = report.loss

    def check(self) -> Report:
        """Measure the loss on held-out text, and add it to the curve."""
        measured = []
        with torch.no_grad(), self._precision():
            for at in self.held_out.split(self.recipe.batch):
                lesson = self.teacher(*self.observations(at))
                measured.append(self.teacher.loss(self.head, lesson, self.recipe.unrolled))
        losses, agreements = ([pair[i] for pair in measured] for i in range(2))
        done = self.steps * self.recipe.batch * self.recipe.window
        self.curve.append(self._report(losses, agreements, done / max(self.seconds, 1e-9), held_out=True))
        return self.curve[-1]

    def save(self, file: Path) -> None:
        state = {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "steps": self.steps,
            "seconds": self.seconds,
            "curve": [tuple(report) for report in self.curve],
            "checked": self.checked,
            "best": self.best,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        atomic_write(file, buffer.getvalue())

    def load(self, file: Path) -> Self:
        """Restore a saved state.

        Raises:
            ValueError: the file cannot be read, or is of another head.
        """
        try:
            state = torch.load(file, weights_only=True)
            self.head.load_state_dict(state["head"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.steps, self.seconds = state["steps"], state["seconds"]
            self.curve = [Report(*report) for report in state["curve"]]
            self.checked, self.best = state["checked"], state["best"]
        except Exception as error:
            raise ValueError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
        return self

    def _drawn(self) -> Tensor:
        """Numbers of this step's windows [B]: the next of the epoch's order."""
        places = self.steps * self.recipe.batch + torch.arange(self.recipe.batch)
        epochs, at = places // self.windows, places % self.windows
        orders = {
            epoch: torch.randperm(self.windows, generator=torch.Generator().manual_seed(epoch))
            for epoch in epochs.unique().tolist()
        }
        return torch.stack([orders[epoch][i] for epoch, i in zip(epochs.tolist(), at.tolist(), strict=True)])

    def _update(self, done: float) -> None:
        """Take one step of the optimizers; `done`: share of the whole time, 0 to 1."""
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        warm = min(1.0, (self.steps + 1) / WARM_UP)
        rate = self.recipe.rate * warm * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))
        for optimizer, scale in zip(self.optimizers, (1.0, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def _report(self, losses: list[Tensor], agreements: list[Tensor], rate: float, *, held_out: bool) -> Report:
        agreement = [round(value, 4) for value in torch.stack(agreements).mean(0).tolist()]
        loss = round(float(torch.stack(losses).mean()), 4)
        return Report(round(self.seconds / 60, 2), self.steps, loss, agreement, round(rate, 1), held_out)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bfloat16)
