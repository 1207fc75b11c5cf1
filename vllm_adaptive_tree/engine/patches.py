"""Patches of vLLM, installed once a tree method is asked for. The ledger with reasons: `patches/README.md`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from vllm_adaptive_tree.engine.names import CONFIG_KEY, DRAFTS, MARK, STREAMS
from vllm_adaptive_tree.version import pip_install
from vllm_adaptive_tree.versions import is_supported, window

PATCHES = {
    "EngineArgs.create_engine_config": "vLLM has a closed list of methods; a tree method is translated before",
    "SamplingParams._validate_spec_decode": (
        "vLLM refuses min_p and logit_bias with its own methods, trees honour them; what a request asks is checked"
    ),
    "VllmConfig._limit_max_model_len_to_draft": (
        "on Model Runner V2, vLLM 0.33 cuts the target's context to the draft's; requests outgrow a tree's draft"
    ),
    "VllmConfig.num_lookahead_tokens": "the nodes of a tree have no slots in the draft's cache",
    "PrometheusStatLogger": "the figures of a step become metrics of the logger's own classes",
    "Scheduler.update_from_output": (
        "a path ends where its request stops, and vLLM's own figures count verified nodes, not the places that are "
        "reserved"
    ),
    "NewRequestData.from_request": "a draft has not read what a KV connector has brought, and the worker is not told",
    "EngineCore.post_step": "draft tokens come with a step's output, and need no second call to the worker",
    "StructuredOutputManager.validate_tokens": (
        "a mask for each node, and nothing is cut as if a tree were a chain (also grammar_bitmask, accept_tokens and "
        "Scheduler.get_grammar_bitmask)"
    ),
    "Parser.__init__": "reasoning and tool parsers get one token a delta, as without speculation",
    "split_delta": "what a step's tokens mean for the Responses API stays in its order",
}
"""Replaced symbols -> the reason in short; the first is replaced by the plugin itself, the others by `install`."""


def install() -> None:
    """Prepare this process for the configuration of a tree method; idempotent.

    Raises:
        RuntimeError: outside the supported window, or where vLLM lacks something that a tree method needs.
    """
    import vllm

    if not is_supported(vllm.__version__):
        raise RuntimeError(
            f"vllm-adaptive-tree supports vLLM {window()}, and this is vLLM {vllm.__version__}. Get a matching one "
            f"with {pip_install('cuda')} or {pip_install('cpu')}, or remove the tree method from speculative_config."
        )
    with missing_symbols_named():
        patch_validate_spec_decode()
        patch_context_limit()
        patch_lookahead()
        patch_prometheus_logger()
        patch_scheduler()
        patch_new_requests()
        patch_engine_core()
        patch_structured_outputs()
        patch_parsers()


def patch_validate_spec_decode() -> None:
    """Wrap `SamplingParams._validate_spec_decode`: min_p and logit_bias stay refused with vLLM's own methods, and are
    accepted with ours, whose walk samples every token with vLLM's whole sampler. What a request asks of its trees is
    checked."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        if mark := getattr(speculative_config, MARK, None):
            mark.check(self)
        else:
            original(self, speculative_config)

    setattr(validate, MARK, True)
    SamplingParams._validate_spec_decode = validate


def patch_context_limit() -> None:
    """Wrap `VllmConfig._limit_max_model_len_to_draft`, which vLLM has from 0.33 on: with ours, a target keeps its
    context if the draft's is shorter. A configuration has our options before it has our mark."""
    from vllm.config.vllm import VllmConfig

    original = getattr(VllmConfig, "_limit_max_model_len_to_draft", None)
    if original is None or getattr(original, MARK, False):
        return

    @wraps(original)
    def limit(self: Any) -> None:
        if not (isinstance(self.additional_config, dict) and CONFIG_KEY in self.additional_config):
            original(self)

    setattr(limit, MARK, True)
    setattr(VllmConfig, original.__name__, limit)


def patch_lookahead() -> None:
    """Wrap `VllmConfig.num_lookahead_tokens`: with ours, a request reserves the slots that its draft writes after those
    of a step, not one for each node."""
    from vllm.config.vllm import VllmConfig

    original = VllmConfig.num_lookahead_tokens.fget
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def num_lookahead_tokens(self: Any) -> int:
        ours = self.additional_config.get(CONFIG_KEY, {}) if isinstance(self.additional_config, dict) else {}
        ahead: int | None = ours.get("slots_ahead")
        return original(self) if ahead is None else ahead

    setattr(num_lookahead_tokens, MARK, True)
    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)


def patch_prometheus_logger() -> None:
    """Wrap `PrometheusStatLogger`: it also gets the metrics of our steps, of its own classes."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from vllm_adaptive_tree.engine.metrics.prometheus import add_tree_metrics, record_tree_metrics

    original, original_record = PrometheusStatLogger.__init__, PrometheusStatLogger.record
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if getattr(vllm_config.speculative_config, MARK, False):
            add_tree_metrics(self)

    @wraps(original_record)
    def record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        original_record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        record_tree_metrics(self, scheduler_stats, engine_idx)

    setattr(init, MARK, True)
    PrometheusStatLogger.__init__, PrometheusStatLogger.record = init, record


def patch_scheduler() -> None:
    """Wrap `Scheduler.update_from_output`: a path ends where its request stops, vLLM's figures count the nodes that
    were verified, not the places that the scheduler has reserved, and our figures get its counts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_adaptive_tree.engine.common.loads import without_failed_loads
    from vllm_adaptive_tree.engine.common.stops import keep_delivered
    from vllm_adaptive_tree.engine.metrics.request_steps import request_steps

    original = Scheduler.update_from_output
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not getattr(self.vllm_config.speculative_config, MARK, False):
            return original(self, scheduler_output, model_runner_output)
        keep_delivered(self, scheduler_output, model_runner_output)
        steps = request_steps(self, scheduler_output, model_runner_output)
        outputs = original(self, scheduler_output, model_runner_output)
        if steps is not None:
            steps.correct(outputs)
        setattr(self, DRAFTS, without_failed_loads(self, getattr(model_runner_output, DRAFTS, None)))
        return outputs

    setattr(update_from_output, MARK, True)
    Scheduler.update_from_output = update_from_output


def patch_new_requests() -> None:
    """Wrap `NewRequestData.from_request`: it says how many tokens a KV connector has brought."""
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_adaptive_tree.engine.common.loads import note_loaded

    original = NewRequestData.from_request.__func__
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        new = original(cls, request, *args, **kwargs)
        note_loaded(new, request)
        return new

    setattr(from_request, MARK, True)
    setattr(NewRequestData, original.__name__, classmethod(from_request))


def patch_engine_core() -> None:
    """Wrap `EngineCore.post_step`: draft tokens that came with the output of a step go to the scheduler from there. The
    call that asks a worker in another process for them takes milliseconds on a busy host."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.post_step
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def post_step(self: Any, model_executed: bool) -> None:
        drafts = getattr(self.scheduler, DRAFTS, None)
        if drafts is None:
            original(self, model_executed)
            return
        setattr(self.scheduler, DRAFTS, None)
        self.scheduler.update_draft_token_ids(drafts)

    setattr(post_step, MARK, True)
    EngineCore.post_step = post_step


def patch_structured_outputs() -> None:
    """Wrap `StructuredOutputManager.validate_tokens`, `.grammar_bitmask` and `.accept_tokens`, and
    `Scheduler.get_grammar_bitmask`: with ours, no draft token is cut unless the grammar has failed, its mask is that of
    its branch, a grammar may end inside an accepted path, and the worker gets the grammars too."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager as Manager
    from vllm.v1.structured_output.utils import strip_speculative_padding

    from vllm_adaptive_tree.engine.grammar.structured_outputs import TreeGrammarOutput, advance, is_lost, tree_masks

    validate, masks, accept = Manager.validate_tokens, Manager.grammar_bitmask, Manager.accept_tokens
    output = Scheduler.get_grammar_bitmask
    if getattr(validate, MARK, False):
        return

    def ours(owner: Any) -> bool:
        return bool(getattr(owner.vllm_config.speculative_config, MARK, False))

    @wraps(validate)
    def validate_tokens(self: Any, request: Any, spec_tokens: Any) -> Any:
        if not (ours(self) and request.use_structured_output):
            return validate(self, request, spec_tokens)
        return [] if is_lost(request) else strip_speculative_padding(spec_tokens)

    @wraps(masks)
    def grammar_bitmask(self: Any, requests: Any, structured_output_request_ids: Any, drafts: Any) -> Any:
        return (tree_masks if ours(self) else masks)(self, requests, structured_output_request_ids, drafts)

    @wraps(accept)
    def accept_tokens(self: Any, request: Any, new_token_ids: Any) -> Any:
        return (advance if request.use_structured_output and ours(self) else accept)(self, request, new_token_ids)

    @wraps(output)
    def get_grammar_bitmask(self: Any, scheduler_output: Any) -> Any:
        masks_of_step = output(self, scheduler_output)
        if masks_of_step is None or not ours(self):
            return masks_of_step
        return TreeGrammarOutput.of(masks_of_step, self.structured_output_manager, self.requests)

    setattr(validate_tokens, MARK, True)
    Manager.validate_tokens, Manager.grammar_bitmask = validate_tokens, grammar_bitmask
    Manager.accept_tokens = accept_tokens
    Scheduler.get_grammar_bitmask = get_grammar_bitmask


def patch_parsers() -> None:
    """Wrap `Parser.__init__`: in a server with a tree method, a stream's parser gets its tokens one by one."""
    from vllm.parser.abstract_parser import Parser

    original = Parser.__init__
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def init(self: Any, tokenizer: Any, *args: Any, model_config: Any = None, **kwargs: Any) -> None:
        original(self, tokenizer, *args, model_config=model_config, **kwargs)
        if getattr(model_config, STREAMS, None) is not None:
            from vllm_adaptive_tree.engine.common.token_deltas import feed_by_token

            patch_split_delta()
            feed_by_token(self, tokenizer, model_config)

    setattr(init, MARK, True)
    Parser.__init__ = init


def patch_split_delta() -> None:
    """Wrap the Responses API's `split_delta`, in a server: a delta of several tokens keeps its order."""
    from vllm.entrypoints.openai.responses import serving

    from vllm_adaptive_tree.engine.common.token_deltas import Runs

    original = serving.split_delta
    if getattr(original, MARK, False):
        return

    @wraps(original)
    def split_delta(delta: Any) -> Any:
        return delta.split(original) if isinstance(delta, Runs) else original(delta)

    setattr(split_delta, MARK, True)
    serving.split_delta = split_delta


@contextmanager
def missing_symbols_named() -> Iterator[None]:
    """Raise a RuntimeError that names the symbol if vLLM lacks one."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        import vllm

        raise RuntimeError(
            f"vllm-adaptive-tree cannot serve a tree method in this vLLM {vllm.__version__}, which is not as released: "
            f"{error}. Install an unmodified vLLM, or remove the tree method from speculative_config."
        ) from error


@contextmanager
def swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set `module.name` to `value` inside the block: if vLLM instantiates a class by name, it instantiates ours."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
