"""From `speculative_config={"method": "opt_tree", ...}` to a configuration that stock vLLM accepts."""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import ONE_FORWARD
from vllm_adaptive_tree.engine import checks, draft_checks, gpu_arguments, one_forward
from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.common.cost_profile import check_folder
from vllm_adaptive_tree.engine.common.node_quota import schedule
from vllm_adaptive_tree.engine.draft_kind import BUILT_AS, NAMES, kind_of
from vllm_adaptive_tree.engine.mark import installed
from vllm_adaptive_tree.engine.names import CONFIG_KEY, MARK
from vllm_adaptive_tree.methods import fitting, resolve

logger = init_logger(f"vllm.{__name__}")

WORKER = "vllm_adaptive_tree.engine.cpu_worker.TreeWorker"
GPU_WORKER = "vllm_adaptive_tree.engine.gpu_worker.TreeGPUWorker"

WITHOUT_CHECKPOINT = "ngram_gpu"
"""vLLM's method for drafts without one while the config is built: it does not switch asynchronous scheduling off. Then
it is "ngram" for Model Runner V2, which keeps tokens on the device for it; V1 makes a "custom_class" from whatever
stands in its place."""
HEAD_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
"""Substrings of a draft's path that make vLLM take it for a head, whatever `method` says."""


def create_tree_engine_config(args: Any, original: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """Build vLLM's config for a tree method; `args` (EngineArgs) stays as the user wrote it.

    Raises:
        ValueError: for anything in the request that this release cannot serve, with the key and the remedy.
        RuntimeError: for a vLLM outside the supported window.
    """
    mark = installed()
    options, vllm_keys = TreeOptions.parse(args.speculative_config)
    pair = resolve(options)
    given, options = options.num_speculative_tokens, fitting(options, pair.proposer)
    gpu_arguments.check_device()
    checks.check_arguments(args)
    check_folder(options.tree.cost_profile)
    draft_checks.check_target(args)
    draft = None
    if options.text is None:
        if vllm_keys.get("model") is None:  # MTP modules in the target's checkpoint
            own = {"model": args.model, "revision": args.revision, "quantization": args.quantization}
            vllm_keys = {**own, **{key: value for key, value in vllm_keys.items() if value is not None}}
        draft = draft_checks.read_draft(args, vllm_keys["model"], vllm_keys.get("revision"))
        options = replace(options, draft=kind_of(draft, said=options.draft, target=args.model))
        draft_checks.check_draft(args, draft, str(options.draft), vllm_keys)
        if options.draft in ONE_FORWARD:
            levels = one_forward.levels_of(draft, str(options.draft))
            fewest = min(given, one_forward.fewest_slots(str(options.draft), levels))
            nodes = max(options.num_speculative_tokens, fewest)
            options = replace(options, levels=levels, num_speculative_tokens=nodes)
    draft_checks.check_method(pair, str(options.draft))

    args = copy.copy(args)
    args.worker_cls = WORKER if current_platform.is_cpu() else GPU_WORKER
    if not current_platform.is_cpu():
        gpu_arguments.set_backend(args)
        gpu_arguments.set_graphs(args, options.num_speculative_tokens)
    args.additional_config = {**args.additional_config, CONFIG_KEY: options.to_json()}
    with _path(options, draft, vllm_keys) as path:
        args.speculative_config = {
            **vllm_keys,
            "model": path,
            "method": BUILT_AS.get(str(options.draft), WITHOUT_CHECKPOINT),
            "num_speculative_tokens": options.num_speculative_tokens,
            # One size for every batch of Model Runner V1, which allocates slots itself; with a schedule vLLM pads no
            # resumed or cached request with draft tokens -1.
            "num_speculative_tokens_per_batch_size": [(1, 1, options.num_speculative_tokens)],
        }
        config = original(args, *rest, **kwargs)
        config.speculative_config.model = vllm_keys["model"]
        if options.text is None:
            config.speculative_config.draft_model_config.model = vllm_keys["model"]
        else:
            config.speculative_config.method = "ngram" if config.use_v2_model_runner else "custom_class"
    setattr(config.speculative_config, MARK, mark)
    checks.check_config(config, options)
    if not current_platform.is_cpu():
        gpu_arguments.check_dtype(config)
    if draft is not None:
        draft_checks.check_fit(config, draft, str(options.draft), options.levels)
        if options.levels is not None:
            one_forward.settle(config.speculative_config, draft, str(options.draft), options.levels)
    if config.use_v2_model_runner:
        scheduler = config.scheduler_config
        config.speculative_config.num_speculative_tokens_per_batch_size = schedule(
            requests=scheduler.max_num_seqs,
            nodes=options.num_speculative_tokens,
            room=scheduler.max_num_batched_tokens,
        )
    logger.info(
        "Tree speculative decoding: %s with up to %d nodes per request and step, draft %s (%s), acceptance rule %s "
        "(%s children), Model Runner %s, asynchronous scheduling %s, %s",
        options.method,
        options.num_speculative_tokens,
        vllm_keys["model"],
        NAMES.get(str(options.draft), "no checkpoint"),
        pair.rule_name,
        pair.proposer.kind,
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
    return config


def _path(
    options: TreeOptions, draft: Checkpoint | None, vllm_keys: dict[str, Any]
) -> contextlib.AbstractContextManager[str]:
    """What vLLM is told to load. It judges some kinds by the path, whatever `method` says."""
    if draft is not None and options.draft in ("peagle", "dflash2", "lilicorr", "dspark"):
        return one_forward.built(draft, str(options.draft))
    if options.draft in ("model", "mtp", "medusa"):
        return _neutral_path(vllm_keys["model"], vllm_keys.get("revision"))
    return contextlib.nullcontext(vllm_keys["model"] if options.text is None else "ngram")


@contextlib.contextmanager
def _neutral_path(model: str, revision: str | None) -> Iterator[str]:
    """A path of the draft that vLLM does not take for a head while the config is built."""
    if not any(name in model.lower() for name in HEAD_NAMES):
        yield model
        return
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.model", "*.txt"]))
    with tempfile.TemporaryDirectory(prefix="draft") as scratch:
        link = Path(scratch) / "draft"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield str(link)
