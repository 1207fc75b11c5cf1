"""Decode the same prompts without speculation, with vLLM's chain and with adaptive trees, greedy and sampled; compare
texts, steps and speed."""

import argparse
import json
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_adaptive_tree.bench.environment import HEAD, TARGET, set_environment, shown
from vllm_adaptive_tree.bench.prompts import PROMPTS
from vllm_adaptive_tree.cli.arguments import add_pair, add_quiet, new_file, parameters, positive, prompts_file
from vllm_adaptive_tree.version import __version__

SIZE = 500_000_000  # parameters of the bundled target, enlarged
CHAIN = 3  # tokens of vLLM's
CACHE = 256 << 20  # bytes: plenty for the bundled pair, and three engines are alive at once
EXAMPLES = (
    "",
    "--model TARGET --draft DRAFT --nodes 24 --json demo.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair(parser, draft=HEAD)
    parser.add_argument(
        "--enlarge-to",
        type=_size,
        metavar="SIZE",
        help="parameters of the target, enlarged by MLP units whose down-projection is zero: the same function at the "
        "cost of a larger model; or none (default: 0.5B for the bundled target, none for another)",
    )
    parser.add_argument("--nodes", type=positive, default=16, help="nodes of the tree (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=24, help="new tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        default=PROMPTS,
        metavar="FILE",
        help="one prompt per line, or blocks separated by lines of three dashes (default: eight bundled prompts)",
    )
    add_quiet(parser)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures and texts there as well")


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 1 if an engine fails or a text differs from the one without speculation other than at a
    near tie, 2 if the target cannot be enlarged, else 0."""
    size, bundled = target_size(options), options.model == TARGET
    set_environment(options.model, options.draft, enlarged=bool(size), cache=None if bundled else 1)
    import vllm

    from vllm_adaptive_tree.bench import demo
    from vllm_adaptive_tree.bench.models import enlarge
    from vllm_adaptive_tree.bench.offline import Setup
    from vllm_adaptive_tree.bench.progress import Progress

    with ExitStack() as stack:
        target = options.model
        if size:
            print(f"the target is enlarged to {size:,} parameters ...", file=sys.stderr, flush=True)
            target = str(Path(stack.enter_context(TemporaryDirectory(prefix="vllm-adaptive-tree-"))) / "target")
            try:
                size = enlarge(Path(options.model), Path(target), size)
            except (ValueError, OSError) as error:
                print(f"error: the target cannot be enlarged: {error}", file=sys.stderr)
                return 2
        configs = demo.configs(target, options.draft, chain=CHAIN, nodes=options.nodes)
        engine = {"logprobs_mode": "raw_logits", **({"kv_cache_memory_bytes": CACHE} if bundled else {})}
        setup = Setup.of(
            configs,
            len(options.prompts),
            model=target,
            dtype=dtype_of(options),
            eager=True,
            max_tokens=options.max_tokens,
            prompts=options.prompts,
            engine=engine,
        )
        found = demo.Demo(configs, setup)
        try:
            with Progress(quiet=options.quiet) as progress:  # large models follow each other
                found.run(together=bundled and size <= SIZE, progress=progress)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    settings = {
        "version": __version__,
        "vllm": vllm.__version__,
        "model": shown(options.model),
        "draft": shown(options.draft),
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


def target_size(options: argparse.Namespace) -> int:
    """Number of parameters that the target is enlarged to; 0: it is used as it is."""
    if options.enlarge_to is not None:
        return int(options.enlarge_to)
    return SIZE if options.model == TARGET else 0


def dtype_of(options: argparse.Namespace) -> str:
    """float32 for the bundled target on an x86 CPU without AVX-512: there each row of a bfloat16 forward costs as much
    as the first."""
    import torch
    from vllm.platforms import current_platform

    slow = current_platform.is_cpu() and platform.machine() == "x86_64" and not torch.cpu._is_avx512_supported()
    return "float32" if options.dtype == "auto" and options.model == TARGET and slow else str(options.dtype)


def _size(text: str) -> int:
    return 0 if text == "none" else parameters(text)
