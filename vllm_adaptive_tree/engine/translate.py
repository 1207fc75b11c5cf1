"""Translation of `speculative_config={"method": "opt_tree", ...}` to a configuration that stock vLLM accepts."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common import token_deltas
from vllm_adaptive_tree.engine.common.node_quota import MOST_ROWS, MOST_TREES, schedule, too_small
from vllm_adaptive_tree.engine.common.request_flags import varying
from vllm_adaptive_tree.engine.drafts.registry import check_target, find
from vllm_adaptive_tree.engine.mark import Mark
from vllm_adaptive_tree.engine.names import CONFIG_KEY, MARK, STREAMS
from vllm_adaptive_tree.engine.patches import install
from vllm_adaptive_tree.engine.startup.cost_profile import check_folder
from vllm_adaptive_tree.engine.targets import checks, gpu_arguments
from vllm_adaptive_tree.methods import as_chains, clamp_budget, resolve
from vllm_adaptive_tree.options import is_count

logger = init_logger(f"vllm.{__name__}")

WORKER = "vllm_adaptive_tree.engine.cpu_worker.TreeWorker"
GPU_WORKER = "vllm_adaptive_tree.engine.gpu_worker.TreeGPUWorker"


def create_tree_engine_config(args: Any, original: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """Build vLLM's config for a tree method; `args` (EngineArgs) stays as the user wrote it.

    Raises:
        ValueError: for anything in the request that this release cannot serve, with the key and the remedy.
        RuntimeError: for a vLLM outside the supported window.
    """
    install()
    options, vllm_keys = TreeOptions.parse(args.speculative_config)
    pair = resolve(options)
    options = clamp_budget(options, pair.proposer)
    gpu_arguments.check_device()
    checks.check_arguments(args)
    check_folder(options.tree.cost_profile)
    check_target(args)
    kind, draft = find(args, options, vllm_keys)
    levels = kind.levels(draft)
    if levels is not None and not is_count(levels):
        raise draft.refused(f"is {kind.title}, whose kind gives it {levels!r} levels; give a positive number or None")
    ahead = kind.slots_ahead(draft)
    options = replace(options, draft=kind.name, kind=kind.import_path, levels=levels, slots_ahead=ahead)
    kind.check_method(pair)

    args = copy.copy(args)
    args.worker_cls = WORKER if current_platform.is_cpu() else GPU_WORKER
    if not current_platform.is_cpu():
        gpu_arguments.set_backend(args)
        gpu_arguments.set_graphs(args, options.num_speculative_tokens, MOST_TREES, MOST_ROWS)
    args.additional_config = {**args.additional_config, CONFIG_KEY: options.to_json()}
    with kind.built_from(draft, vllm_keys) as path:
        args.speculative_config = {
            **vllm_keys,
            "model": path,
            "method": kind.built_as or kind.method,
            "num_speculative_tokens": options.num_speculative_tokens,
        }
        asked = args.enable_prefix_caching  # vLLM writes its default here
        config = original(args, *rest, **kwargs)
        if asked is None and checks.keeps_states_by_prefix(config):
            args.enable_prefix_caching = False
            config = original(args, *rest, **kwargs)
    if config.model_config.is_hybrid:
        checks.check_recurrent(config)
        options = as_chains(options)
        pair = resolve(options)
        config.additional_config[CONFIG_KEY] = options.to_json()
    kind.restore(config, vllm_keys["model"])
    requests, (limit, room) = config.scheduler_config.max_num_seqs, checks.step_limit(config.scheduler_config)
    why = varying(pair, options, requests=requests, room=room, most=MOST_TREES if config.use_v2_model_runner else None)
    setattr(config.speculative_config, MARK, Mark(options, why))
    if token_deltas.wanted():
        setattr(config.model_config, STREAMS, config.model_config.get_diff_sampling_param())
    checks.check_config(config, options)
    if not current_platform.is_cpu():
        gpu_arguments.check_config(config)
        gpu_arguments.keep_updates(config)
    kind.finalize(config, draft)
    # With a schedule vLLM pads no resumed or cached request with draft tokens -1. Given before, it would be dropped for
    # some drafts on Model Runner V1 of 0.33, and beside replicas.
    config.speculative_config.num_speculative_tokens_per_batch_size = (
        schedule(
            requests=requests,
            nodes=options.num_speculative_tokens,
            room=room,
            budget=options.tree.budget,
        )
        if config.use_v2_model_runner
        else [(1, 1, options.num_speculative_tokens)]  # V1 allocates slots itself
    )
    logger.info(
        "Tree speculative decoding: %s with up to %d nodes per request and step, draft %s (%s), acceptance rule %s "
        "(%s), Model Runner %s, asynchronous scheduling %s, %s",
        options.method,
        options.num_speculative_tokens,
        vllm_keys["model"],
        kind.title,
        pair.rule_name,
        pair.proposer.children,
        "V2" if config.use_v2_model_runner else "V1",
        "on" if config.scheduler_config.async_scheduling else "off",
        options.tree,
    )
    if (file := options.tree.shipped()) is not None:
        logger.warning(
            "%s uses the bundled %s, learnt from the demo pair: it keeps the output, but for your own pair train one "
            "(docs/training.md) and name it in 'tree'",
            options.method,
            file.name,
        )
    if pair.loss is not None:
        logger.warning("allow_lossy: %s", pair.loss)
    longest = config.model_config.max_model_len
    if (small := too_small(nodes=options.num_speculative_tokens, room=room, longest=longest, limit=limit)) is not None:
        logger.warning(small)
    return config
