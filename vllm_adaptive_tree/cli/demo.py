"""Decode the same prompts without speculation, with vLLM's chain and with OPT-Tree; compare texts, steps and speed."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_adaptive_tree.bench.enlarge import enlarge
from vllm_adaptive_tree.bench.prompts import PROMPTS
from vllm_adaptive_tree.cli.arguments import new_file, parameters, positive, prompts_file
from vllm_adaptive_tree.cli.comparison import Comparison, Method
from vllm_adaptive_tree.cli.generation import Generation, Load

PACKAGE = Path(__file__).resolve().parents[1]
PAIR = PACKAGE / "demo_pair"
SIZE = 500_000_000  # parameters of the bundled target, enlarged
CACHE = 256 << 20  # bytes: plenty for the bundled pair, and three engines are alive at once
ROUNDS = 3
ENVIRONMENT = {  # set where the user has not
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more threads slow a tiny model down
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # each engine has a process of its own already
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def methods(options: argparse.Namespace) -> list[Method]:
    """What is compared: the first is the reference, the last one's text is shown."""

    def drafted(method: str, nodes: int) -> dict[str, Any]:
        return {"method": method, "model": options.draft, "num_speculative_tokens": nodes}

    return [
        Method("no speculation", None),
        Method(f"vLLM chain of {options.chain}", drafted("draft_model", options.chain)),
        Method(f"OPT-Tree of {options.nodes}", drafted("opt_tree", options.nodes)),
    ]


def loads(prompts: int) -> list[Load]:
    alone = Load("one request at a time", 1, rounds=1)  # as many turns as prompts
    return [alone, Load(f"{prompts} requests at a time", prompts, ROUNDS)] if prompts > 1 else [alone]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pair = "default: the bundled %s"
    parser.add_argument("--model", type=_model, default=str(PAIR / "target"), help=pair % "target")
    parser.add_argument("--draft", type=_model, default=str(PAIR / "draft"), help=pair % "draft")
    parser.add_argument(
        "--enlarge-to",
        type=_size,
        metavar="SIZE",
        help="parameters of the target, which is enlarged without a change of its function, or none: as it is "
        "(default: 0.5B for the bundled target, none for another)",
    )
    parser.add_argument("--dtype", default="auto", help="as vLLM's (default: the target's own; the bundled: bfloat16)")
    parser.add_argument("--nodes", type=positive, default=16, help="nodes of the tree (default: %(default)s)")
    parser.add_argument("--chain", type=positive, default=3, help="tokens of vLLM's chain (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=48, help="new tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        default=PROMPTS,
        metavar="FILE",
        help="one prompt per line, or blocks separated by lines of three dashes (default: eight bundled prompts)",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures and texts there as well")


def run(options: argparse.Namespace) -> int:
    """Returns 1 where a method's output differs from the output without speculation at no near tie, 2 where the target
    cannot be enlarged, else 0."""
    size = target_size(options)
    settings = environment(options.model, enlarged=bool(size))
    for name, value in settings.items():
        os.environ.setdefault(name, value)
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
        compared, under = methods(options), loads(len(options.prompts))
        found = Comparison(size, compared, under, options.prompts, generate(options, target, compared, under))
    show(options, found)
    if options.json:
        options.json.write_text(json.dumps(record(options, found, settings), indent=2) + "\n")
    wrong = [difference for difference in found.differences() if not difference.near_tie]
    for load, method, request, margin, _ in wrong:
        print(
            f"Output differs from the output without speculation: {method}, {load}, prompt {request + 1}: a "
            f"token {margin:.3g} below the best logit",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def target_size(options: argparse.Namespace) -> int:
    """Parameters that the target is enlarged to; 0: it is used as it is."""
    if options.enlarge_to is not None:
        return int(options.enlarge_to)
    return SIZE if _bundled(options.model) else 0


def environment(model: str, *, enlarged: bool) -> dict[str, str]:
    """`ENVIRONMENT` without what suits only the bundled pair, or only a tiny target."""
    bundled = _bundled(model)
    unfit = {
        "HF_HUB_OFFLINE": not bundled,
        "OMP_NUM_THREADS": enlarged or not bundled,
        "VLLM_CPU_KVCACHE_SPACE": bundled,  # more than `CACHE`, and vLLM would obey it
    }
    return {name: value for name, value in ENVIRONMENT.items() if not unfit.get(name)}


def generate(
    options: argparse.Namespace, target: str, compared: Sequence[Method], under: Sequence[Load]
) -> list[list[Generation]]:  # [load][method]
    """Small engines take turns; those of the user's own models, which may be large, live one after the other."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from vllm_adaptive_tree.cli.stepping import Engine, Job, compare

    bundled, batch = _bundled(options.model), max(load.batch for load in under)
    small, cache = bundled and target_size(options) <= SIZE, CACHE if bundled else None
    jobs = [Job(name, target, config, options.dtype, batch, cache) for name, config in compared]
    tokens = len(options.prompts) * options.max_tokens * len(jobs) * sum(load.rounds for load in under)
    generations: list[list[Generation]] = [[] for _ in under]
    with tqdm(total=tokens, desc="decoding", unit="tok", disable=None) as bar:
        for together in [jobs] if small else [[job] for job in jobs]:
            with ExitStack() as stack:
                engines = []
                for job in together:
                    tqdm.write(f"{job.name}: an engine starts ...", file=sys.stderr)
                    engines.append(stack.enter_context(Engine(job)))
                for load, found in zip(under, generations, strict=True):
                    reference = found[0].tokens[0] if found else None
                    found += compare(engines, load, options.prompts, options.max_tokens, reference, bar.update)
    return generations


def show(options: argparse.Namespace, found: Comparison) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    found.print_texts(console)
    found.print_tables(console)
    if found.size:
        target = "the bundled one" if _bundled(options.model) else shown(options.model)
        console.print(
            f"The target is {target}, enlarged to {found.size:,} parameters by MLP units whose down-projection is "
            "zero: the same function at the cost of a model of that size."
        )
    found.print_conditions(console)


def record(options: argparse.Namespace, found: Comparison, settings: dict[str, str]) -> dict[str, Any]:
    """Everything that was measured, for `--json`."""
    return {
        "versions": found.versions(),
        "settings": {
            "model": shown(options.model),
            "enlarged_to": found.size or None,
            "draft": shown(options.draft),
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "dtype": found.about.dtype,
            "threads": found.about.threads,
            "environment": {name: os.environ[name] for name in settings},
        },
        "prompts": list(options.prompts),
        "loads": found.figures(shown),
    }


def shown(model: str) -> str:
    """The bundled models by their place in the package, others as given."""
    return Path(model).relative_to(PACKAGE).as_posix() if Path(model).is_relative_to(PACKAGE) else model


def _model(text: str) -> str:
    if Path(text).parent == PAIR and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            "the bundled pair is a package of its own and is not installed: pip install 'vllm-adaptive-tree[demo]', or "
            "name both models"
        )
    return text


def _bundled(model: str) -> bool:
    return model == str(PAIR / "target")


def _size(text: str) -> int:
    return 0 if text == "none" else parameters(text)
