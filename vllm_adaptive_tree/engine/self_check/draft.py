"""Check D for a draft model: the rows of its levels against the same paths as plain sequences in vLLM's attention.

Other drafts are not compared: a head reads hidden states that no text gives, and look-ups run no model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.self_check.distance import allowed_error, distance
from vllm_adaptive_tree.engine.self_check.trial import Trial
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.v2.speculator import ModelSpeculator


class RecordedLevel(NamedTuple):
    tokens: Tensor  # [R, W]
    parent: Tensor  # [R, W], slots as in `Frontier`
    logits: Tensor  # [R, W, V]


class Path(NamedTuple):
    """Path from a root to one of the deepest nodes."""

    tokens: list[int]
    logits: list[Tensor]  # [V] of each


@contextmanager
def recorded(runner: Any) -> Iterator[list[RecordedLevel]]:
    """Record the levels that a draft model reads inside the block; of other drafts none."""
    speculator, levels = runner.speculator, list[RecordedLevel]()
    if not isinstance(speculator, ModelSpeculator):
        yield levels
        return
    grow = speculator.grow

    def watched(tokens: Tensor, parent: Tensor, state: Any) -> Any:
        rows, state = grow(tokens, parent, state)
        levels.append(RecordedLevel(tokens, parent, rows.logits.float()))
        return rows, state

    speculator.grow = watched  # type: ignore[method-assign]
    try:
        with speculator.graphs.bypassed():  # a graph runs no `grow`
            yield levels
    finally:
        del speculator.grow


def finding(trial: Trial, levels: list[RecordedLevel], requests: list[str], texts: dict[str, list[int]]) -> Finding:
    """Result of the check. `requests`: by row; `texts`: with the roots, by request."""
    deepest = {f"{name} drafted": _deepest(levels, row) for row, name in enumerate(requests)} if levels else {}
    paths = {name: path for name, path in deepest.items() if path.tokens}
    before = {f"{name} drafted": text for name, text in texts.items()}
    native = _native(trial, before, paths)
    turned = _native(trial, before, {name: path._replace(tokens=path.tokens[::-1]) for name, path in paths.items()})
    noise = error = peak = 0.0
    control = float("inf")
    for name, path in paths.items():
        mine = torch.stack(path.logits)
        error, peak = max(error, distance(mine, native[name])), max(peak, float(native[name].abs().max()))
        noise = max(noise, distance(native[name], _native(trial, before, {name: path})[name]))
        if path.tokens != path.tokens[::-1]:  # a draft may repeat a token
            control = min(control, distance(mine, turned[name]))
    allowed = allowed_error(trial.coarsest(draft=True), noise=noise, peak=peak)
    figures = {"error": error, "allowed": allowed, "vLLM's": noise, "path reversed": control}
    figures |= {"levels": len(levels), "paths": len(paths)}  # 0: no node was worth reading
    return Finding("draft", error <= allowed and (not paths or allowed < control), figures)


def _deepest(levels: list[RecordedLevel], row: int) -> Path:
    """Path to the last of the deepest nodes that were read: it has the most other nodes beside it."""
    slots: list[Path] = [Path([], [])]
    best = slots[0]
    for level in levels:
        above = level.parent[row].tolist()
        for column, token in enumerate(level.tokens[row].tolist()):
            before = slots[above[column]]
            slots.append(Path([*before.tokens, token], [*before.logits, level.logits[row, column]]))
            if token >= 0 and len(slots[-1].tokens) >= len(best.tokens):
                best = slots[-1]
    return best


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
