"""Train a gate for a pair of models: C2T's classifier or MCSD's decision models."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_adaptive_tree.cli import collecting
from vllm_adaptive_tree.cli.arguments import positive
from vllm_adaptive_tree.cli.collecting import Job, collect, job_of, resumable
from vllm_adaptive_tree.gates import training
from vllm_adaptive_tree.gates.mlp import Gate
from vllm_adaptive_tree.gates.parts import Collected
from vllm_adaptive_tree.gates.training import Recipe, Trained, Watch, score
from vllm_adaptive_tree.proposers.mcsd import FEATURES
from vllm_adaptive_tree.trees import Shape

GRID = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gates = parser.add_subparsers(dest="gate", required=True, metavar="GATE")

    c2t = gates.add_parser("c2t", help="C2T's classifier, learnt from EAGLE-2 trees (arXiv 2502.13652)")
    collecting.add_arguments(c2t, what="the gate (safetensors)")
    c2t.add_argument("--nodes", type=positive, default=1010, help="of a tree, at most (default: %(default)s)")
    c2t.add_argument("--top-k", type=positive, default=10, help="children of a node (default: %(default)s)")
    c2t.add_argument("--max-depth", type=positive, default=11, help="levels of a tree (default: %(default)s)")
    c2t.add_argument("--entropy-top", type=positive, default=1000, help="as the method's option (default: %(default)s)")
    c2t.add_argument("--hidden", type=positive, default=48, help="width of the hidden layer (default: %(default)s)")
    c2t.add_argument(
        "--negatives", type=positive, default=2, help="kept for each positive example (default: %(default)s)"
    )
    c2t.add_argument(
        "--from", dest="start", type=_gate, metavar="FILE", help="fine-tune this gate, on a tenth of the prompts"
    )
    c2t.set_defaults(train=_c2t)

    mcsd = gates.add_parser("mcsd", help="MCSD's decision models (arXiv 2409.10744)")
    collecting.add_arguments(mcsd, what="the gate (safetensors)")
    mcsd.add_argument(
        "--type", choices=("type1", "type2"), default="type2", help="what it reads, as `stop` (default: %(default)s)"
    )
    mcsd.add_argument("--shape", type=positive, nargs="+", default=[4, 2, 2, 1], help="(default: 4 2 2 1)")
    mcsd.set_defaults(train=_mcsd)


def run(options: argparse.Namespace) -> int:
    return resumable(options, lambda: options.train(options))


def _c2t(options: argparse.Namespace) -> None:
    start: Gate | None = options.start
    prompts = options.prompts
    if start is not None:  # the paper's tenth; two is the least: one is held out
        prompts = prompts[: max(2, len(prompts) // 10)]
    tree = {"top_k": options.top_k, "max_depth": options.max_depth}
    job = job_of(options, "c2t", {"entropy_top": options.entropy_top}, "eagle2", options.nodes, tree, prompts)
    collected = collect(job)
    recipe = training.C2T if start is None else training.C2T_FINE_TUNING
    with _watched(recipe) as watch:
        trained = training.train_c2t(
            collected.columns,
            gate=start or training.fresh(3, options.hidden),
            negatives=options.negatives,
            recipe=recipe,
            watch=watch,
        )
    if start is not None:
        print(f"before: {_score(trained.epochs[0].score)}")
    _finish(options.out, "c2t", "beta", job, collected, trained, {"negatives": options.negatives})


def _mcsd(options: argparse.Namespace) -> None:
    kind = f"mcsd-{options.type}"
    nodes = len(Shape.k_config(options.shape))
    job = job_of(options, kind, {}, "mcsd", nodes, {"shape": options.shape})
    collected = collect(job)
    width = collected.columns["features"].shape[1]
    hidden = (44,) if options.type == "type2" else (2 * width // 3, width // 3)
    assert options.type == "type1" or width == FEATURES
    with _watched(training.MCSD) as watch:
        trained = training.train_mcsd(
            collected.columns, gate=training.fresh(width, *hidden), balance=options.type == "type2", watch=watch
        )
    _finish(options.out, kind, "stop_threshold", job, collected, trained, {})


@contextmanager
def _watched(recipe: Recipe) -> Iterator[Watch]:
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=1 + recipe.epochs, desc="training", unit="epoch", disable=None) as bar:
        yield lambda epoch: bar.update()


def _finish(
    out: Path, kind: str, threshold: str, job: Job, collected: Collected, trained: Trained, settings: dict[str, int]
) -> None:
    label, of_a_tree = collected.columns["label"], kind == "c2t"
    print(f"{collected.trees:,} trees, {len(label):,} examples, {label.sum():,.0f} of them positive")
    print(f"held out: {len(trained.label):,} examples, {trained.label.sum():,.0f} positive")
    for epoch in trained.epochs[1:]:
        mark = "  <- taken" if epoch is trained.best else ""
        print(f"epoch {epoch.number:2}: loss {epoch.loss:.4f}, {_score(epoch.score)}{mark}")
    print(f"\n{threshold:>14}  recall  positive rate" + "  nodes of a tree" * of_a_tree)
    for value in GRID:
        recall, rate = score(trained.confidence, trained.label, value)
        nodes = f"  {rate * len(label) / collected.trees:15.1f}" * of_a_tree
        print(f"{value:14}  {recall:6.3f}  {rate:13.4f}{nodes}")
    recall, rate = trained.best.score
    trained.best.gate.save(
        out,
        {"kind": kind, **job.arguments(), **settings, "trees": collected.trees, "epoch": trained.best.number}
        | {"recall": round(recall, 4), "positive_rate": round(rate, 4)},
    )
    print(f"\n{out} is written; the examples stay in {job.parts}", file=sys.stderr)


def _score(value: training.Score) -> str:
    return f"recall {value.recall:.3f}, positive rate {value.positive_rate:.4f}"


def _gate(file: str) -> Gate:
    try:
        return Gate.load(file, inputs=3)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
