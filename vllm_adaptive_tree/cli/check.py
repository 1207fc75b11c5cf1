"""Say what a configuration will do with a target, from the files of its models, in about a second: the kind of draft,
the rule, nodes, the draft's memory on each rank, and what is refused.

It starts no engine. With --vllm it also builds vLLM's own configuration, about ten seconds, which finds all that is
refused before models are loaded. A configuration that is refused ends it with 2.
"""

import argparse
import json
import os
from reprlib import repr as short
from typing import Any

from vllm_adaptive_tree.cli.arguments import model, positive
from vllm_adaptive_tree.cli.main import one_line
from vllm_adaptive_tree.engine.preview import Arguments, preview
from vllm_adaptive_tree.engine.startup.draft_memory import format_bytes

EXAMPLES = (
    """'{"method": "adaptive_tree", "model": "DRAFT", "num_speculative_tokens": 24}' --model TARGET""",
    """'{"method": "adaptive_tree", "model": "ngram", "num_speculative_tokens": 16}' --model TARGET --json --vllm""",
)


SHOWN = (1, 8, 32, 128)
"""Sizes of a batch in the text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Arguments("")
    parser.add_argument("config", type=_config, metavar="JSON", help="the speculative_config")
    which = "a folder, or a hub name in the cache"
    parser.add_argument("--model", type=model, required=True, metavar="TARGET", help=which)
    for name, default, what in (
        ("--tensor-parallel-size", defaults.tensor_parallel_size, "ranks"),
        ("--max-num-seqs", defaults.max_num_seqs, "requests of a batch"),
        ("--max-num-batched-tokens", defaults.max_num_batched_tokens, "tokens of a step"),
    ):
        parser.add_argument(name, type=positive, default=default, metavar="N", help=what)
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="longest text (default: the target's)")
    parser.add_argument("--dtype", default=defaults.dtype, help="as vLLM's")
    parser.add_argument("--vllm", action="store_true", help="build vLLM's configuration, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    given = Arguments(*(getattr(options, name) for name in Arguments._fields))
    try:
        found = preview(options.config, given)
        if options.vllm:
            found["vllm"] = _built(options.config, given)
    except (ValueError, RuntimeError) as error:
        if not options.json:
            raise ValueError(one_line(error)) from error
        found = {"refused": one_line(error)}
    found = {"ok": "refused" not in found, **found}
    print(json.dumps(found, indent=1) if options.json else _text(found))
    return 0 if found["ok"] else 2


def _built(config: dict[str, Any], given: Arguments) -> dict[str, Any]:
    """Build vLLM's configuration for these models."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    built = EngineArgs(**given._asdict(), speculative_config=config).create_engine_config()
    return {
        "model_runner": "V2" if built.use_v2_model_runner else "V1",
        "async_scheduling": bool(built.scheduler_config.async_scheduling),
        "dtype": str(built.model_config.dtype).removeprefix("torch."),
        "max_model_len": built.model_config.max_model_len,
    }


def _text(found: dict[str, Any]) -> str:
    draft, memory = found["draft"], found["memory"]
    weights = "not known" if memory["weights"] is None else format_bytes(memory["weights"])
    quotas = {int(last): nodes for last, nodes in found["nodes_up_to_requests"].items()}
    sizes = sorted({*SHOWN, max(quotas)})
    shares = [
        f"{next(quotas[last] for last in quotas if size <= last)} of {size}" for size in sizes if size <= max(quotas)
    ]
    budget = {"auto": "as many of them as pay off", None: "always all of them"}
    lines = [
        f"target: {found['target']['model']} ({', '.join(found['target']['architectures'])})",
        f"draft: {draft['model']} ({draft['is']}"
        + (f" of {draft['levels']} levels)" if draft["levels"] is not None else ")"),
        f"method: {found['method']}, at most {found['nodes']} nodes in {found['depth']} levels for a request and step, "
        + budget.get(found["budget"], f"{found['budget']} in a batch"),
        f"rule: {found['rule']}, {'lossless' if found['lossless'] else 'NOT LOSSLESS'}; {found['children']}",
        f"nodes of each request that a step on a GPU has room for: {', '.join(shares)}",
        f"draft memory of each rank: weights {weights}, K/V {memory['kv_per_token']} bytes per token, level buffers up "
        f"to {format_bytes(memory['level_buffers'])}",
        *(f"vLLM: {name.replace('_', ' ')} {value}" for name, value in found.get("vllm", {}).items()),
        *(f"note: {note}" for note in found["notes"]),
    ]
    by = "vLLM's configuration" if "vllm" in found else "these files; --vllm asks vLLM, too"
    return "\n".join([*lines, f"OK: not refused by {by}"])


def _config(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{short(text)} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise argparse.ArgumentTypeError(f'{short(text)} is no mapping; write {{"method": "adaptive_tree", ..}}')
    return data
