"""Start-up check of an engine: its parts, a verdict for all ranks, and its consequence.

On an untested device it keeps a wrong kernel from emitting a wrong token: where a part fails, this engine decodes
without trees.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_adaptive_tree.engine.common.attention import AttentionVariant
from vllm_adaptive_tree.engine.common.ranks import objects_of_all
from vllm_adaptive_tree.engine.names import setting
from vllm_adaptive_tree.engine.self_check import attention, draws, model, ranks, waits
from vllm_adaptive_tree.engine.self_check.certificate import Certificate
from vllm_adaptive_tree.engine.self_check.verdict import Finding, Verdict

logger = init_logger(f"vllm.{__name__}")

SWITCH = "ADAPTIVE_TREE_GPU_CHECK"
MODES = ("", "strict", "off")
REPRODUCE = "vllm-adaptive-tree doctor --gpu"
NODES = 64
"""Most nodes of the trees of the attention check."""


def start(runner: Any) -> Verdict | None:
    """Check the engine of a `runner` that has loaded, captured and warmed up; on a failure switch its trees off.

    Returns:
        None if `ADAPTIVE_TREE_GPU_CHECK=off`.

    Raises:
        RuntimeError: a part failed, and the variable is "strict".
        ValueError: the variable is none of `MODES`.
    """
    mode = setting(SWITCH)
    if mode not in MODES:
        raise ValueError(f"{SWITCH}={mode!r}; it may be 'strict' (a failed check is an error), 'off', or unset")
    if mode == "off":
        logger.warning("%s=off: nothing checks the tree kernels on this device", SWITCH)
        return None
    certificate = Certificate(runner)
    light = certificate.exists()
    verdict = check(runner, light=light)
    if verdict.passed and get_tp_group().rank_in_group == 0 and not light:
        certificate.write(verdict)
    if not verdict.passed and mode != "strict" and runner.drop_whole_graphs():
        logger.warning("Tree self check FAILED with whole CUDA graphs: %s. It runs again without them", verdict)
        verdict = check(runner)
    if verdict.passed:
        logger.info("Tree self check: %s", verdict)
        return verdict
    text = f"Tree self check FAILED: {', '.join(verdict.failed)}. {verdict}. To reproduce it: {REPRODUCE}"
    if mode == "strict":
        raise RuntimeError(text)
    logger.error("%s. This engine decodes WITHOUT trees, by vLLM's own kernels", text)
    runner.switch_off()
    return verdict


@torch.inference_mode()
def check(runner: Any, *, light: bool = False) -> Verdict:
    """Run all parts; every rank fails where one does. `light`: only those whose result may change under an equal
    certificate: the attention kernel on this device, and the agreement of ranks."""
    target = [
        (runner.attention.layers[name], group.kv_cache_spec.block_size)
        for group in runner.kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if name in runner.attention.layers
    ]
    findings = list[Finding]()
    for layer, block_size in {_shape(*layer_and_size): layer_and_size for layer_and_size in target}.values():
        findings += _guarded("attention", partial(_attention, runner, layer, block_size))
    vocabulary, decided = runner.model_config.get_vocab_size(), list[Any]()
    if light:
        findings += _guarded("draws", lambda: _drawn(runner, vocabulary, decided))
    else:
        findings += _guarded("draws", lambda: [draws.check(vocabulary=vocabulary, device=runner.device)])
        findings += _guarded("model", lambda: _steps(runner, decided))
    findings.append(ranks.check(decided))  # not in a part: a rank that raises there would not come here
    mine = Verdict(findings)
    failed_elsewhere = sorted({name for failed in objects_of_all(mine.failed) for name in failed} - set(mine.failed))
    if failed_elsewhere:
        findings.append(Finding("another rank", False, {"failed": " ".join(failed_elsewhere)}))
    return Verdict(findings)


def _attention(runner: Any, layer: Any, block_size: int) -> list[Finding]:
    nodes = min(runner.options.num_speculative_tokens, NODES)
    shapes = {"block_size": block_size, "nodes": nodes, "longest": runner.max_model_len}
    return [attention.check(layer, scale=layer.impl.scale, variant=AttentionVariant.of(layer.impl), **shapes)]


def _shape(layer: Any, block_size: int) -> tuple[Any, ...]:
    window, soft_cap, sinks = AttentionVariant.of(layer.impl)
    variant = window, soft_cap, sinks is None
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.impl.scale,
        layer.kv_cache.dtype,
        block_size,
        variant,
    )


def _steps(runner: Any, decided: list[Any]) -> list[Finding]:
    """Run checks C to E: the engine's own steps. `decided` gets what check F compares."""
    with waits.watched(runner.device) as places:
        outcome = model.check(runner)
    decided += outcome.decided
    return [*outcome.findings, waits.finding(places)]


def _drawn(runner: Any, vocabulary: int, decided: list[Any]) -> list[Finding]:
    """`decided` gets draws of this rank."""
    decided.append(draws.drawn(vocabulary=vocabulary, device=runner.device))
    return []


def _guarded(name: str, part: Callable[[], list[Finding]]) -> list[Finding]:
    """Run a part; one that raises has failed: a kernel that does not compile here, or too little memory."""
    try:
        return part()
    except Exception as error:
        logger.exception("Tree self check: %s", name)
        return [Finding(name, False, {"raised": f"{type(error).__name__}: {error}".splitlines()[0]})]
