"""Train a gate for a pair of models: C2T's classifier or MCSD's decision models."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.cli import collecting
from vllm_adaptive_tree.cli.arguments import positive
from vllm_adaptive_tree.cli.collecting import Job, collect, job_of, resumable
from vllm_adaptive_tree.gates import training
from vllm_adaptive_tree.gates.parts import Collected
from vllm_adaptive_tree.gates.training import Epoch, Run, Trained, Watch, new_gate, score
from vllm_adaptive_tree.proposers.c2t import features
from vllm_adaptive_tree.proposers.gate import FEATURES, Gate
from vllm_adaptive_tree.proposers.mcsd import FEATURES as MCSD_FEATURES
from vllm_adaptive_tree.trees import Shape

GRID = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
EXAMPLES = (
    "c2t --model TARGET --draft DRAFT --out gate.safetensors",
    "mcsd --model TARGET --draft DRAFT --type type2 --out stop.safetensors",
)


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
        "--features",
        choices=tuple(FEATURES),
        help="what it reads of a path: its probability (paper), or the logarithm of it (log, the default)",
    )
    c2t.add_argument(
        "--negatives",
        type=positive,
        default=8,
        help="kept for each positive example; they count as two of them in any case (default: %(default)s)",
    )
    _seeds(c2t)
    c2t.add_argument(
        "--from", dest="start", type=_gate, metavar="FILE", help="fine-tune this gate, on a tenth of the prompts"
    )
    c2t.set_defaults(train=_c2t)

    mcsd = gates.add_parser("mcsd", help="MCSD's decision models (arXiv 2409.10644)")
    collecting.add_arguments(mcsd, what="the gate (safetensors)")
    mcsd.add_argument(
        "--type", choices=("type1", "type2"), default="type2", help="what it reads, as `stop` (default: %(default)s)"
    )
    mcsd.add_argument("--shape", type=positive, nargs="+", default=[4, 2, 2, 1], help="(default: 4 2 2 1)")
    _seeds(mcsd)
    mcsd.set_defaults(train=_mcsd)


def _seeds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds",
        type=positive,
        default=3,
        metavar="COUNT",
        help="trainings, of which the one with the smallest held-out loss is kept (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    return resumable(options, lambda: options.train(options))


def _c2t(options: argparse.Namespace) -> None:
    start: Gate | None = options.start
    kind = options.features or ("log" if start is None else start.features)
    if start is not None and kind != start.features:
        raise ValueError(
            f"--features {kind}: the gate of --from reads {start.features!r} features, and goes on with them; leave "
            "--features out"
        )
    prompts = options.prompts
    if start is not None:  # the paper's tenth; at least two, since one is held out
        prompts = prompts[: max(2, len(prompts) // 10)]
    tree = {"top_k": options.top_k, "max_depth": options.max_depth}
    job = job_of(options, "c2t", {"entropy_top": options.entropy_top}, "eagle2", options.nodes, tree, prompts)
    collected = collect(job)
    found = collected.columns
    inputs = features(found["path"], found["entropy"], found["depth"], kind)
    with _watched() as watch:
        trained = training.train_c2t(
            found | {"features": inputs},
            begin=lambda seed: start or new_gate(3, options.hidden, seed=seed, features=kind),
            negatives=options.negatives,
            recipe=training.C2T if start is None else training.C2T_FINE_TUNING,
            seeds=range(options.seeds),
            watch=watch,
        )
    if start is not None:
        before = trained.run.epochs[0]
        print(f"before: held-out loss {before.loss:.4f}, {_score(before.score)}")
    _finish(options.out, "c2t", "beta", job, collected, trained, {"negatives": options.negatives})


def _mcsd(options: argparse.Namespace) -> None:
    kind = f"mcsd-{options.type}"
    nodes = len(Shape.k_config(options.shape))
    job = job_of(options, kind, {}, "mcsd", nodes, {"shape": options.shape})
    collected = collect(job)
    width = collected.columns["features"].shape[1]
    hidden = (44,) if options.type == "type2" else (2 * width // 3, width // 3)
    assert options.type == "type1" or width == MCSD_FEATURES
    with _watched() as watch:
        trained = training.train_mcsd(
            collected.columns,
            begin=lambda seed: new_gate(width, *hidden, seed=seed),
            balance=options.type == "type2",
            seeds=range(options.seeds),
            watch=watch,
        )
    _finish(options.out, kind, "stop_threshold", job, collected, trained, {})


@contextmanager
def _watched() -> Iterator[Watch]:
    """Show a progress bar for a training, which runs on one thread: more would slow so small a model down."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    torch.set_num_threads(1)
    with tqdm(desc="training", unit="epoch", disable=None) as bar:

        def watch(seed: int, epoch: Epoch) -> None:
            bar.set_description(f"training, seed {seed}", refresh=False)
            bar.set_postfix(loss=f"{epoch.loss:.4f}", refresh=False)
            bar.update()

        yield watch


def _finish(
    out: Path, kind: str, threshold: str, job: Job, collected: Collected, trained: Trained, settings: dict[str, Any]
) -> None:
    label, per_tree = collected.columns["label"], kind == "c2t"
    print(f"{collected.trees:,} trees, {len(label):,} examples, {label.sum():,.0f} of them positive")
    print(f"held out: {len(trained.label):,} examples, {trained.label.sum():,.0f} positive")
    print(f"a constant: held-out loss {trained.run.constant:.4f}")
    for run in trained.runs:
        print(_summary(run) + "  <- taken" * (run is trained.run))
    print(f"\n{threshold:>14}  recall  positive rate" + "  nodes of a tree" * per_tree)
    for value in GRID:
        recall, rate = score(trained.confidence, trained.label, value)
        nodes = f"  {rate * len(label) / collected.trees:15.1f}" * per_tree
        print(f"{value:14}  {recall:6.3f}  {rate:13.4f}{nodes}")
    best, run = trained.best, trained.run
    trained.best.gate.save(
        out,
        {"kind": kind, **job.arguments(), **settings, "trees": collected.trees, "seed": run.seed, "epoch": best.number}
        | {"held_out_loss": round(best.loss, 4), "of_a_constant": round(run.constant, 4)}
        | {"recall": round(best.score.recall, 4), "positive_rate": round(best.score.positive_rate, 4)},
    )
    print(f"\n{out} is written; the examples stay in {job.parts}", file=sys.stderr)


def _summary(run: Run) -> str:
    alive = ", ".join(f"{units} of {of}" for units, of in run.alive)
    text = f"seed {run.seed}: held-out loss {run.best.loss:.4f} at epoch {run.best.number} of {run.epochs[-1].number}, "
    return text + f"{_score(run.best.score)}, {alive} units alive" + (f", FAILED: {run.failed}" if run.failed else "")


def _score(value: training.Score) -> str:
    return f"recall {value.recall:.3f}, positive rate {value.positive_rate:.4f}"


def _gate(file: str) -> Gate:
    try:
        return Gate.load(file, inputs=3)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
