"""Train an EAGLE-3 or a one-forward (DSpark) head for a small target, and write it as a checkpoint that vLLM loads.

One text in 32 is held out, chosen by a checksum of its name.
"""

import argparse
import json
import math
import platform
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_adaptive_tree.bench.environment import TARGET, shown
from vllm_adaptive_tree.cli.arguments import new_file, positive
from vllm_adaptive_tree.files import atomic_write, claim_folder

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_adaptive_tree.heads.training import Report, Training

MIN_WINDOWS = 100  # to train on
DEPTHS = {"eagle3": 4, "dspark": 7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default=TARGET, metavar="DIR", help="a model's folder (default: the bundled target)"
    )
    parser.add_argument("--text", nargs="+", required=True, metavar="GLOB", help="files to train on: 'src/**/*.py'")
    parser.add_argument("--out", type=new_file, required=True, metavar="DIR", help="the head; DIR.training: its state")
    parser.add_argument("--minutes", type=_number, required=True, help="of training, without interruptions")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted training, if there is one")
    parser.add_argument(
        "--kind",
        choices=tuple(DEPTHS),
        default="eagle3",
        help="one forward per depth, or all depths in one (default: %(default)s)",
    )
    parser.add_argument(
        "--steps-unrolled", type=positive, help="depths that it learns to draft (default: 4; 7 in one forward)"
    )
    parser.add_argument("--layers", type=positive, help="dspark: layers of the head (default: 2)")
    parser.add_argument("--markov-rank", type=positive, help="dspark: of its bias by the token before (default: 64)")
    parser.add_argument(
        "--draft-vocab", type=positive, metavar="N", help="draft the N most frequent tokens only (default: all)"
    )
    parser.add_argument(
        "--auxiliary-layers",
        type=int,
        nargs="+",
        metavar="K",
        help="of the target, whose inputs the head reads (default: vLLM's, 2, L // 2 and L - 3)",
    )
    parser.add_argument("--batch", type=positive, default=8, help="windows of a step (default: %(default)s)")
    parser.add_argument("--window", type=positive, default=256, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--rate", type=_number, default=1e-2, help="highest learning rate (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of matrix products (default: %(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="compile for half a minute; steps take a quarter less")


def run(options: argparse.Namespace) -> int:
    try:
        _train(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the state is kept; the same command with --resume continues there", file=sys.stderr)
        return 130
    return 0


def _train(options: argparse.Namespace) -> None:
    out: Path = options.out
    if out.exists():
        raise ValueError(f"{out} exists; give another --out or delete it")
    state = out.with_name(out.name + ".training")
    if state.exists() and not options.resume:
        raise ValueError(f"{state} holds an interrupted training; continue with --resume, or delete it")
    _of_its_kind(options)
    config = _config(options.target)

    import torch
    from transformers import AutoModelForCausalLM

    from vllm_adaptive_tree.heads import checkpoint
    from vllm_adaptive_tree.heads.block_training import BlockTeacher
    from vllm_adaptive_tree.heads.dspark import Block, BlockHead
    from vllm_adaptive_tree.heads.eagle3 import Dimensions, Head, auxiliary_layers
    from vllm_adaptive_tree.heads.training import Recipe, Teacher, Training

    size = Dimensions.of(config)
    layers = auxiliary_layers(config["num_hidden_layers"], options.auxiliary_layers)
    if options.kind == "dspark" and layers[0] == 0:
        raise ValueError("--auxiliary-layers 0: a dspark head reads what layers give, not the embeddings; begin with 1")
    mask = _mask(config, size.vocabulary)
    tokens, held_out = _tokens(options)
    print(f"{len(tokens):,} tokens to train on, {len(held_out):,} held out", flush=True)
    ids = options.draft_vocab and checkpoint.most_frequent(tokens, size.vocabulary, options.draft_vocab)
    recipe = Recipe(
        minutes=options.minutes,
        unrolled=options.steps_unrolled or DEPTHS[options.kind],
        batch=options.batch,
        window=options.window,
        rate=options.rate,
        bfloat16=options.dtype == "bfloat16",
        compiled=options.compile,
    )
    block = None
    if options.kind == "dspark":
        block = Block(options.layers or 2, recipe.unrolled, options.markov_rank or 64, mask)
    settings = {
        "target": shown(options.target),
        **({} if block is None else {"kind": options.kind, **block._asdict()}),
        "tokens": f"{len(tokens)} ({zlib.crc32(tokens.numpy().tobytes()):08x})",
        "draft_vocab": options.draft_vocab,
        "auxiliary_layers": layers,
        **recipe._asdict(),
    }
    claim_folder(state / "manifest.json", settings, contents="the state")

    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    head: Head | BlockHead
    teacher: Teacher | BlockTeacher
    if block is None:
        teacher, head = Teacher(target, layers, ids), Head(size, len(layers), options.draft_vocab)
        teacher.initialise(head)
    else:
        teacher, head = BlockTeacher(target, layers, block.depth, block.mask), BlockHead(size, len(layers), block)
        teacher.initialise(head, tokens)
    training, saved = Training(head, teacher, tokens, held_out, recipe), state / "state.pt"
    if saved.exists():
        training.load(saved)
        print(f"continues at step {training.steps:,}, minute {training.seconds / 60:.1f}", flush=True)
    training.run(save=saved, watch=_print)
    if isinstance(head, BlockHead):
        checkpoint.write_block(out, head, config, layers)
    else:
        checkpoint.write(out, head, config, layers, ids)
    record = {"python": platform.python_version(), **settings, **_record(training)}
    atomic_write(out / "training.json", (json.dumps(record, indent=2) + "\n").encode())
    print(f"{out} is written; {state} can be deleted", file=sys.stderr)


def _of_its_kind(options: argparse.Namespace) -> None:
    """Raises ValueError for options of the other kind."""
    wrong = {"eagle3": ("layers", "markov_rank"), "dspark": ("draft_vocab",)}[options.kind]
    for name in wrong:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} means nothing for --kind {options.kind}; leave it out")


def _mask(config: dict[str, Any], vocabulary: int) -> int:
    """The token that stands where a block predicts.

    Raises:
        ValueError: the target's config.json names one that its vocabulary does not have.
    """
    end = config.get("eos_token_id")
    found = config.get("pad_token_id") or (end[0] if isinstance(end, list) and end else end) or 0
    if not 0 <= found < vocabulary:
        raise ValueError(
            f"--target: pad_token_id or eos_token_id {found} of its config.json is not among its {vocabulary} tokens; "
            "correct it"
        )
    return int(found)


def _tokens(options: argparse.Namespace) -> tuple["Tensor", "Tensor"]:
    """Texts to train on and held-out texts, flat."""
    import torch
    from transformers import AutoTokenizer

    from vllm_adaptive_tree.heads import texts

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    kept: list[int] = []
    held_out: list[int] = []
    for name, text in texts.read(options.text):
        (held_out if texts.is_held_out(name) else kept).extend([*tokenizer.encode(text, verbose=False), *end])
    if len(kept) < MIN_WINDOWS * options.window or len(held_out) < options.window:
        raise ValueError(
            f"{len(kept):,} tokens to train on and {len(held_out):,} held out, of one file in {texts.HELD_OUT} by its "
            f"name: {MIN_WINDOWS * options.window:,} and {options.window:,} are needed; give more files"
        )
    return torch.tensor(kept), torch.tensor(held_out)


def _config(target: str) -> dict[str, Any]:
    file = Path(target) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist: --target is a model's folder")
    return json.loads(file.read_text())


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _print(report: "Report") -> None:
    agreement = " ".join(f"{value:.3f}" for value in report.agreement)
    where = "held out" if report.held_out else f"{report.tokens_per_second:,.0f} tokens/s"
    print(
        f"{report.minutes:6.1f} min, step {report.steps:,}: loss {report.loss:.3f}, agreement {agreement}, {where}",
        flush=True,
    )


def _record(training: "Training") -> dict[str, Any]:
    """What `training.json` says of a finished training."""
    last = training.curve[-1]
    return {
        "parameters": sum(weight.numel() for weight in training.head.parameters()),
        "steps": last.steps,
        "tokens_per_second": last.tokens_per_second,
        "held_out_loss": last.loss,
        "held_out_agreement_by_depth": last.agreement,
        "curve": [
            {"minutes": at.minutes, "steps": at.steps, "loss": at.loss, "agreement": at.agreement}
            for at in training.curve
        ],
    }
