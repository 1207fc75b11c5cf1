"""Decode the same prompts without speculation, with vLLM's chain and with OPT-Tree; compare texts, steps and speed."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_adaptive_tree.cli.arguments import new_file, positive, prompts_file
from vllm_adaptive_tree.cli.prompts import PROMPTS
from vllm_adaptive_tree.version import __version__

if TYPE_CHECKING:
    from vllm_adaptive_tree.cli.generation import Generation
    from vllm_adaptive_tree.report.table import Row

PACKAGE = Path(__file__).resolve().parents[1]
PAIR = PACKAGE / "demo_pair"
ROUNDS, SHOWN = 3, 2
ENOUGH_CORE = 0.9  # of one core, for a time worth comparing
ENVIRONMENT = {  # set where the user has not
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more threads slow a tiny model down
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # each engine has a process of its own already
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Method(NamedTuple):
    name: str
    speculative_config: dict[str, Any] | None


def methods(options: argparse.Namespace) -> list[Method]:
    """What is compared: the first is the reference, the last one's text is shown."""

    def drafted(method: str, nodes: int) -> dict[str, Any]:
        return {"method": method, "model": options.draft, "num_speculative_tokens": nodes}

    return [
        Method("no speculation", None),
        Method(f"vLLM chain of {options.chain}", drafted("draft_model", options.chain)),
        Method(f"OPT-Tree of {options.nodes}", drafted("opt_tree", options.nodes)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pair = "default: the bundled %s"
    parser.add_argument("--model", type=_model, default=str(PAIR / "target"), help=pair % "target")
    parser.add_argument("--draft", type=_model, default=str(PAIR / "draft"), help=pair % "draft")
    parser.add_argument("--nodes", type=positive, default=25, help="nodes of the tree (default: %(default)s)")
    parser.add_argument("--chain", type=positive, default=5, help="tokens of vLLM's chain (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="new tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        default=PROMPTS,
        metavar="FILE",
        help="one prompt per line, or blocks separated by lines of three dashes (default: eight bundled prompts)",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures and texts there as well")


def run(options: argparse.Namespace) -> int:
    """Returns 1 where a method's output differs from the output without speculation, else 0."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from rich.console import Console

    from vllm_adaptive_tree.cli.generation import Job, generate
    from vllm_adaptive_tree.report.table import remark, table

    compared = methods(options)
    generations = []
    for name, config in compared:
        print(f"{name}: an engine starts ...", file=sys.stderr, flush=True)
        job = Job(name, options.model, config, options.prompts, options.max_tokens, ROUNDS)
        generations.append(generate(job))
    results = rows(compared, generations)

    console = Console(highlight=False)
    show_texts(console, compared[-1].name, options.prompts, generations[-1])
    console.print(table(results), "")
    console.print(
        f"{len(options.prompts)} prompts in one batch, {options.max_tokens} new tokens each, greedy, float32; "
        f"tokens/s: median of {ROUNDS} rounds."
    )
    if text := remark(results):
        console.print(text)
    share = min(run.core_share for run in generations)
    if share < ENOUGH_CORE and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        console.print(
            f"Other programs kept the cores busy (an engine got {share:.0%} of one): do not trust tokens/s here."
        )
    if options.json:
        options.json.write_text(json.dumps(record(options, compared, generations, results), indent=2) + "\n")
    different = [row.method for row in results if not row.identical]
    if different:
        print(f"Output differs from the output without speculation: {'; '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def rows(compared: Sequence[Method], generations: Sequence["Generation"]) -> list["Row"]:
    from vllm_adaptive_tree.report.table import Row

    reference = generations[0]
    return [
        Row(
            method=method.name,
            tokens_per_step=run.tokens_per_step,
            nodes_per_step=run.nodes_per_step,
            tokens_per_second=run.tokens_per_second,
            ratio=run.tokens_per_second / reference.tokens_per_second,
            identical=all(tokens == reference.tokens[0] for tokens in run.tokens),
        )
        for method, run in zip(compared, generations, strict=True)
    ]


def show_texts(console: Any, name: str, prompts: Sequence[str], generation: "Generation") -> None:
    from rich.text import Text

    from vllm_adaptive_tree.report.tokens import coloured, legend

    for index, (prompt, spans) in enumerate(list(zip(prompts, generation.spans, strict=True))[:SHOWN], 1):
        console.rule(f"{name}, prompt {index}", align="left", style="dim")
        console.print(Text.assemble((prompt, "dim"), coloured(spans)), soft_wrap=True)
        console.print()
    console.rule(style="dim")
    console.print(legend(colours=console.color_system is not None and not console.no_color), "\n")


def record(
    options: argparse.Namespace, compared: Sequence[Method], generations: Sequence["Generation"], rows: Sequence["Row"]
) -> dict[str, Any]:
    """Everything that was measured, for `--json`."""
    import torch

    return {
        "versions": {
            "vllm_adaptive_tree": __version__,
            "vllm": generations[0].vllm_version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "model": shown(options.model),
            "draft": shown(options.draft),
            "max_tokens": options.max_tokens,
            "rounds": ROUNDS,
            "temperature": 0,
            "dtype": "float32",
            "environment": {name: os.environ[name] for name in ENVIRONMENT},
        },
        "prompts": list(options.prompts),
        "methods": [
            row._asdict()
            | {
                "speculative_config": config and config | {"model": shown(config["model"])},
                "seconds": run.seconds,
                "cpu_seconds": run.cpu_seconds,
                "counters": run.counters,
                "texts": run.texts,
            }
            for row, (_, config), run in zip(rows, compared, generations, strict=True)
        ],
    }


def shown(model: str) -> str:
    """The bundled models by their place in the package, others as given."""
    return Path(model).relative_to(PACKAGE).as_posix() if Path(model).is_relative_to(PACKAGE) else model


def _model(text: str) -> str:
    if Path(text).parent == PAIR and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            "the bundled pair is missing: train it with `python examples/train_demo_pair.py --out "
            "vllm_adaptive_tree/demo_pair`, or name both models"
        )
    return text
