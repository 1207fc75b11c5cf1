"""Worker start-up, for both model runners: rank checks before models are loaded, then cost measurement or profile."""

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import torch
from vllm.logger import init_logger

from vllm_adaptive_tree.acceptance import TargetOnly
from vllm_adaptive_tree.budget import Costs, DraftTemperature, Planner
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.ranks import object_from_rank_0, objects_of_all
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.installation import NODE, difference, here
from vllm_adaptive_tree.engine.names import CONFIG_KEY
from vllm_adaptive_tree.engine.startup.cost_profile import LEARNT, CostProfile, digest, key_of
from vllm_adaptive_tree.engine.startup.draft_memory import DraftMemory, LevelBuffers, format_bytes, own_weights
from vllm_adaptive_tree.engine.startup.measuring import DISTURBED, MeasuredCosts
from vllm_adaptive_tree.json_numbers import member
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE

logger = init_logger(f"vllm.{__name__}")


class Measures(Protocol):
    """Timing of forwards: `engine/v1/startup_costs.py`, `engine/v2/startup_costs.py`."""

    def measured_threshold(self, runner: Any, nodes: int) -> float: ...

    def measured_costs(self, runner: Any, nodes: int) -> MeasuredCosts: ...


class Learning(NamedTuple):
    """Costs and statistics that a process has learnt, for the next one to begin with."""

    planner: Planner
    temperature: DraftTemperature | None
    steering: ThresholdController

    def to_json(self) -> dict[str, Any]:
        learnt = {"planner": self.planner.to_json(), "steering": self.steering.to_json()}
        temperature = None if self.temperature is None else self.temperature.to_json()
        return {"costs": self.planner.costs.to_json(), "learnt": {**learnt, "temperature": temperature}}


def tree_options(vllm_config: Any) -> TreeOptions:
    """Our options, in an engine process."""
    return TreeOptions.from_json(vllm_config.additional_config[CONFIG_KEY])


def check_ranks(vllm_config: Any) -> None:
    """Compare the settings of all ranks, as every node may have its own command line (`--node-rank`).

    Raises:
        RuntimeError: on every rank: one has other packages or options than rank 0; names its node and the remedy.
    """
    first, *rest = objects_of_all({**here(), **_settings(vllm_config)})
    wrong = [differing for settings in rest if (differing := difference(settings, first)) is not None]
    if wrong:
        raise RuntimeError(
            f"A tree method needs the same packages and options on every node, and {'; '.join(wrong)} as for rank 0 on "
            f"node {first[NODE]}; install, and give, the same on every node"
        )


def _settings(vllm_config: Any) -> dict[str, str]:
    """Settings that the shape of a tree depends on, in the user's words; the cost profile is rank 0's alone."""
    given = tree_options(vllm_config).to_json()
    tree = {name: value for name, value in given.pop("tree").items() if name != "cost_profile"}
    settings = {f"speculative_config['{name}']": value for name, value in given.items()}
    settings |= {f"speculative_config['tree']['{name}']": value for name, value in tree.items()}
    settings |= {f"the file of 'tree' '{name}'": _content(tree[name]) for name in LEARNT if name in tree}
    settings["Model Runner"] = "V2" if vllm_config.use_v2_model_runner else "V1"
    return {name: repr(value) for name, value in settings.items()}


def _content(file: str | None) -> str | None:
    """Digest of the file, or the error of a node that lacks it."""
    try:
        return digest(file)
    except OSError as error:
        return str(error)


def draft_memory(
    runner: Any, layers: Collection[str], draft: Any, *, requests: int, rows: int | None = None
) -> DraftMemory:
    """Memory of the draft of a loaded `runner`, logged before the KV cache is sized. `layers`: its attention layers;
    `draft`: its module, None if it has none; `requests`, `rows`: as in `LevelBuffers.of`."""
    config, options = runner.vllm_config, runner.options
    spec = config.speculative_config.draft_model_config
    kind = kind_in(options)
    feeds_back = kind.node_states and not kind.independent
    levels = LevelBuffers.of(
        requests=requests,
        nodes=options.num_speculative_tokens,
        depth=runner.pair.proposer.max_depth,
        vocabulary=config.model_config.get_vocab_size(),
        size=config.model_config.dtype.itemsize if options.text is None else torch.float32.itemsize,
        hidden=spec.get_hidden_size() if draft is not None and feeds_back else None,
        kept=runner.pair.rule is not TargetOnly,
        rows=rows,
        depths=options.levels or 0,
    )
    specs = [config.compilation_config.static_forward_context[name].get_kv_cache_spec(config) for name in layers]
    kv = sum(spec_of_layer.page_size_bytes // spec_of_layer.block_size for spec_of_layer in specs)
    memory = DraftMemory(own_weights(draft, runner.get_model()), kv, levels)
    logger.info("Draft memory of each rank: %s", memory.describe(config.model_config.max_model_len))
    return memory


def available_memory(worker: Any, available: int) -> int:
    """Bytes of `available` that are left for the KV cache. vLLM counts the draft's weights, as it sizes the cache after
    loading; it does not see the buffers of levels, unless its profile runs them."""
    memory: DraftMemory = worker.model_runner.draft_memory
    if memory.profiled:
        return available
    levels = format_bytes(sum(memory.levels))
    if worker.cache_config.kv_cache_memory_bytes is not None:  # VLLM_CPU_KVCACHE_SPACE sets it too
        logger.info("The size of the KV cache is given: the level buffers of the draft, up to %s, come on top", levels)
        return available
    free = memory.within(available)
    if free < sum(memory.levels):
        logger.warning(
            "The level buffers of the draft may need %s, and %s are kept free beside the KV cache; lower max_num_seqs, "
            "num_speculative_tokens or max_depth",
            levels,
            format_bytes(free),
        )
    return available - free


def finish_startup(runner: Any, rank: int, measures: Measures) -> None:
    """Measure or read what the options leave open. Raises ValueError for a `cost_profile` that cannot be written."""
    tree, nodes = runner.options.tree, runner.options.num_speculative_tokens
    steering: ThresholdController = runner.steering
    if steering.steered.measured:
        steering.proposer.threshold = measures.measured_threshold(runner, nodes)
        logger.info("tree threshold 'auto': %.3f tokens per level, measured", steering.proposer.threshold)
    if tree.budget != "auto":
        return
    profile = None
    if rank == 0 and tree.cost_profile is not None:
        profile = CostProfile.of(tree.cost_profile, key_of(runner.vllm_config, runner.options))
    content = object_from_rank_0(None if profile is None else profile.read())
    learning = None
    if content is not None:
        try:
            learning = _restored(runner, content)
        except Exception as error:  # the file may hold anything
            if profile is not None:
                profile.reject(error)
    source = "as an earlier process left them"
    if learning is None:
        costs, disturbance, drafting = measures.measured_costs(runner, nodes)
        learning, source = _new(runner, costs), "measured"
        if drafting is not None:
            for drafted, seconds in ((True, drafting), (False, 0.0)):
                learning.planner.overheads[drafted].append(seconds)
        if disturbance > DISTURBED:
            profile = None
            logger.warning(
                "Something else keeps the processors busy: forwards took %.1f times their CPU time. The budget starts "
                "from CPU time, and no cost profile is kept; start on an idle machine once",
                disturbance,
            )
    logger.info("tree budget 'auto': %s, %s", source, learning.planner.costs)
    runner.begin_budget(learning.planner, learning.temperature)
    if profile is not None:
        profile.collect = learning.to_json
        profile.write()
        runner.profile = profile


def save_profile(worker: Any) -> None:
    """Write the profile before the `worker` shuts down."""
    profile = getattr(getattr(worker, "model_runner", None), "profile", None)
    if profile is not None:
        profile.write()


def _new(runner: Any, costs: Costs) -> Learning:
    costs = costs.in_graphs(runner.compilation_config.cudagraph_capture_sizes)
    temperature = DraftTemperature(GREEDY_DRAFT_TEMPERATURE) if runner.steering.steered.temperature else None
    return Learning(
        Planner(costs, sampled=runner.cuts_sampled, drafts=not runner.pair.looks_up), temperature, runner.steering
    )


def _restored(runner: Any, data: dict[str, Any]) -> Learning:
    """Learning from a profile; from costs alone the rest begins anew. Raises ValueError where `data` is not what
    `Learning.to_json` gives; the steering is then as it was."""
    learning = _new(runner, Costs.from_json(data["costs"]))
    if "learnt" not in data:
        return learning
    learnt = data["learnt"]
    learning.planner.restore(member(learnt, "planner"))
    if learning.temperature is not None:
        learning.temperature.restore(member(learnt, "temperature"))
    learning.steering.restore(member(learnt, "steering"))
    return learning
