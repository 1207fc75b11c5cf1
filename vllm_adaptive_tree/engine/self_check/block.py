"""Check D of a head of one forward: its block behind an accepted path, and behind the same text as a plain sequence.

The context that such a head attends to is made of the target's states, of which a step with trees picks the rows of the
accepted nodes.
"""

from torch import Tensor

from vllm_adaptive_tree.engine.self_check.distance import allowed_error, distance
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.v2.block_speculator import BlockSpeculator
from vllm_adaptive_tree.engine.v2.trial import Trial

Texts = dict[str, list[int]]


def drafted(trial: Trial) -> dict[str, Tensor]:
    """Hidden states [K, H] that the last step drafted each request from; none without such a head."""
    speculator = trial.runner.speculator
    if not isinstance(speculator, BlockSpeculator):
        return {}
    states = speculator.block.predicting[: len(trial.requests)].clone().float()
    return dict(zip(trial.requests, states.unbind(), strict=True))


def finding(trial: Trial, blocks: dict[str, Tensor], begun: Texts, texts: Texts) -> Finding:
    """Result of the check. `blocks`: of the step that verified trees; `begun`, `texts`: before and after it, with the
    roots. A block behind the reversed path may differ by less than a rounding; it need not."""
    together = _natively(trial, texts)
    noise = max(distance(together[name], _natively(trial, {name: texts[name]})[name]) for name in texts)
    peak = max(float(block.abs().max()) for block in together.values())
    allowed = allowed_error(trial.coarsest(draft=True), noise=noise, peak=peak)
    errors = sorted(distance(blocks[name], together[name]) for name in texts)
    # a rounding may have chosen another expert of the target, and with it a whole block
    error = errors[len(errors) // 2 if trial.runner.model_config.is_moe else -1]
    turned = _natively(trial, {name: _path_reversed(begun[name], text) for name, text in texts.items()})
    control = min(distance(blocks[name], turned[name]) for name in texts)
    figures = {"error": error, "allowed": allowed, "vLLM's": noise, "path reversed": control, "paths": len(texts)}
    return Finding("draft", error <= allowed, figures)


def _path_reversed(begun: list[int], text: list[int]) -> list[int]:
    return begun + text[len(begun) : -1][::-1] + text[-1:]


def _natively(trial: Trial, texts: Texts) -> dict[str, Tensor]:
    """As `drafted`, behind texts that are read as plain sequences, with their last tokens as roots."""
    blocks = dict[str, Tensor]()
    for _ in trial.read_to_root(texts):
        blocks |= drafted(trial)
    return blocks
