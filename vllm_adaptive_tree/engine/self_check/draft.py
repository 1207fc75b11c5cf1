"""Check D: the rows of a draft's levels against the same paths in vLLM's attention, of a model, or a head with levels.

Look-ups run no model, and one forward of vLLM's drafts all levels of other heads (`block.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.self_check.distance import ROWS_OF_EXPERTS, allowed_error, distance
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.v2.head_speculator import HeadSpeculator
from vllm_adaptive_tree.engine.v2.speculator import ModelSpeculator
from vllm_adaptive_tree.engine.v2.trial import Trial


class RecordedLevel(NamedTuple):
    tokens: Tensor  # [R, W]
    parent: Tensor  # [R, W], slots as in `Frontier`
    logits: Tensor  # [R, W, V]
    root: Tensor  # [R]: position of each root in the draft
    given: Tensor | None  # [R, W, H]: states that a head's rows read beside the tokens


class Path(NamedTuple):
    """Path from a root to one of the deepest nodes."""

    tokens: list[int]
    logits: list[Tensor]  # [V] of each
    given: list[Tensor]  # [H] of each, if a head reads them

    @property
    def reversed(self) -> "Path":
        return self._replace(tokens=self.tokens[::-1])


@contextmanager
def recorded(runner: Any) -> Iterator[list[RecordedLevel]]:
    """Record the levels that a draft of the kinds above reads inside the block; of others none."""
    speculator, levels = runner.speculator, list[RecordedLevel]()
    if not isinstance(speculator, ModelSpeculator | HeadSpeculator) or (
        isinstance(speculator, HeadSpeculator) and speculator.latent
    ):
        yield levels
        return
    grow = speculator.grow

    def watched(tokens: Tensor, parent: Tensor, state: Any) -> Any:
        given, root = state.below(parent)[1], state.root
        rows, state = grow(tokens, parent, state)
        levels.append(RecordedLevel(tokens, parent, _finite(rows.logits), root, given))
        return rows, state

    speculator.grow = watched  # type: ignore[method-assign]
    try:
        with speculator.graphs.bypassed():  # a graph runs no `grow`
            yield levels
    finally:
        del speculator.grow


def of_head(trial: Trial, levels: list[RecordedLevel], requests: list[str]) -> Finding:
    """Result of the check for a head, right after the step that drafted. `requests`: by row. Its rows depend on the
    states that they are given, so a path from its end may differ by less than a rounding; it need not."""
    paths = _paths(levels, requests)
    together = _read_anew(trial, levels, paths)
    alone = {name: _read_anew(trial, levels, {name: path})[name] for name, path in paths.items()}
    turned = _read_anew(trial, levels, {name: path.reversed for name, path in paths.items()})
    found = _compared(trial, len(levels), paths, together, alone, turned)
    return found._replace(passed=found.figures["error"] <= found.figures["allowed"])


def of_model(trial: Trial, levels: list[RecordedLevel], requests: list[str], texts: dict[str, list[int]]) -> Finding:
    """Result of the check for a model. `requests`: by row; `texts`: with the roots, by request."""
    paths = _paths(levels, requests)
    before = {f"{name} drafted": text for name, text in texts.items()}
    together = _native(trial, before, paths)
    turned = _native(trial, before, {name: path.reversed for name, path in paths.items()})
    alone = {name: _native(trial, before, {name: path})[name] for name, path in paths.items()}
    return _compared(trial, len(levels), paths, together, alone, turned)


def _compared(
    trial: Trial,
    levels: int,
    paths: dict[str, Path],
    native: dict[str, Tensor],
    alone: dict[str, Tensor],
    turned: dict[str, Tensor],
) -> Finding:
    """Compare paths with what vLLM's attention makes of them, all together, each alone, and from their ends."""
    noise = error = peak = 0.0
    control = float("inf")
    share = ROWS_OF_EXPERTS if paths and trial.runner.speculator.draft_model_config.is_moe else 1.0
    for name, path in paths.items():
        mine = torch.stack(path.logits)
        error, peak = max(error, distance(mine, native[name], share=share)), max(peak, float(native[name].abs().max()))
        noise = max(noise, distance(native[name], alone[name]))
        if path.tokens != path.tokens[::-1]:  # a draft may repeat a token
            control = min(control, distance(mine, turned[name], share=share))
    allowed = allowed_error(trial.coarsest(draft=True), noise=noise, peak=peak)
    figures = {"error": error, "allowed": allowed, "vLLM's": noise, "path reversed": control}
    figures |= {"levels": levels, "paths": len(paths)}  # 0: no node was worth reading
    return Finding("draft", error <= allowed and (not paths or allowed < control), figures)


def _paths(levels: list[RecordedLevel], requests: list[str]) -> dict[str, Path]:
    deepest = {f"{name} drafted": _deepest(levels, row) for row, name in enumerate(requests)} if levels else {}
    return {name: path for name, path in deepest.items() if path.tokens}


def _deepest(levels: list[RecordedLevel], row: int) -> Path:
    """Path to the last of the deepest nodes that were read: it has the most other nodes beside it."""
    slots: list[Path] = [Path([], [], [])]
    best = slots[0]
    for level in levels:
        above = level.parent[row].tolist()
        for column, token in enumerate(level.tokens[row].tolist()):
            before = slots[above[column]]
            given = before.given if level.given is None else [*before.given, level.given[row, column]]
            slots.append(Path([*before.tokens, token], [*before.logits, level.logits[row, column]], given))
            if token >= 0 and len(slots[-1].tokens) >= len(best.tokens):
                best = slots[-1]
    return best


def _read_anew(trial: Trial, levels: list[RecordedLevel], paths: dict[str, Path]) -> dict[str, Tensor]:
    """Head's logits [L, V] of the rows of paths, read behind their requests' contexts with the states that they were
    given; their K/V is written after the roots, where no later step reads it before it writes."""
    if not paths:
        return {}
    speculator: Any = trial.runner.speculator
    device, sizes = speculator.device, [len(path.tokens) for path in paths.values()]
    names = [name.removesuffix(" drafted") for name in paths]
    begins = [int(levels[0].root[trial.requests.index(name)]) + 1 for name in names]
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    place = torch.cat([torch.arange(*bounds, device=device) for bounds in zip(begins, ends, strict=True)])
    metadata, slots = speculator.metadata_of(
        torch.tensor([trial.index(name) for name in names], device=device),
        torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32, device=device),
        torch.tensor(ends, dtype=torch.int32, device=device),
        place,
        np.array(sizes),
        np.array(ends),
        speculator.late_slots,
    )
    tokens = torch.tensor([token for path in paths.values() for token in path.tokens], dtype=torch.int32, device=device)
    given = torch.stack([state for path in paths.values() for state in path.given])
    hidden, _ = speculator.forward(tokens, place, metadata, given, slots)
    logits = _finite(speculator.compute_draft_logits(hidden, 0)).split(sizes)
    return dict(zip(paths, logits, strict=True))


def _native(trial: Trial, before: dict[str, list[int]], paths: dict[str, Path]) -> dict[str, Tensor]:
    """Draft's logits [L, V] after each of the L tokens of the paths, read together after the texts `before`."""
    if not paths:
        return {}
    speculator, hidden = trial.runner.speculator, list[Tensor]()
    run = speculator._run_model

    def watched(*args: Any) -> Tensor:
        hidden.append(run(*args))
        return hidden[-1]

    speculator._run_model = watched
    try:
        trial.begin({name: before[name] + path.tokens for name, path in paths.items()}, more=0)
    finally:
        del speculator._run_model
    logits, end = {}, 0
    for name in trial.requests:  # each text, then the token that the target has sampled after it
        end += len(before[name]) + len(paths[name].tokens)
        rows = hidden[0][end - len(paths[name].tokens) : end]
        logits[name] = speculator.compute_draft_logits(rows, 0).float()
        end += 1
    trial.finish(list(paths))
    return logits


def _finite(logits: Tensor) -> Tensor:
    """Logits in float32; 0 for tokens outside a head's own vocabulary."""
    return logits.float().masked_fill(logits == -torch.inf, 0.0)
