"""Train an EAGLE-3 head, a one-forward (DSpark) head or a draft of its own layers for a small target, and write it as a
checkpoint that vLLM loads.

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
from vllm_adaptive_tree.cli.arguments import new_file, positive, positive_number
from vllm_adaptive_tree.cli.interrupts import interruptible
from vllm_adaptive_tree.files import atomic_write, claim_folder

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_adaptive_tree.heads.training import Report, Training

MIN_WINDOWS = 100  # to train on
DEPTHS = {"eagle3": 4, "dspark": 7, "layers": 1}
EXAMPLES = (
    "--target TARGET --text 'src/**/*.py' --minutes 60 --out head",
    "--target TARGET --text 'src/**/*.py' --minutes 120 --out head --resume",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default=TARGET, metavar="DIR", help="a model's folder (default: the bundled target)"
    )
    parser.add_argument("--text", nargs="+", required=True, metavar="GLOB", help="files to train on: 'src/**/*.py'")
    parser.add_argument("--out", type=new_file, required=True, metavar="DIR", help="the head; DIR.training: its state")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        required=True,
        help="of training, without interruptions, checks and compilation",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted training, if there is one, or a finished one with more --minutes",
    )
    parser.add_argument(
        "--kind",
        choices=tuple(DEPTHS),
        default="eagle3",
        help="a head with one forward per depth, one with all depths in one, or a few of the target's layers "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps-unrolled", type=positive, help="depths that it learns to draft (default: 4; 7 in one forward)"
    )
    parser.add_argument(
        "--layers",
        type=positive,
        help="dspark: of the head (default: 2); layers: of the target, its first ones and its last (default: 3)",
    )
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
    parser.add_argument(
        "--rate", type=positive_number, default=1e-2, help="highest learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of matrix products (default: bfloat16 where the CPU has instructions for it)",
    )
    parser.add_argument("--compile", action="store_true", help="compile for half a minute; steps take a quarter less")


def run(options: argparse.Namespace) -> int:
    def note() -> str:
        head = f"{options.out} is the best head so far, and " if options.out.exists() else ""
        return f"{head}the state is kept; the same command with --resume continues there"

    return interruptible(lambda: _train(options), note)


def _train(options: argparse.Namespace) -> None:
    out: Path = options.out
    if out.exists() and not options.resume:
        raise ValueError(f"{out} exists; give another --out, delete it, or train it longer with --resume")
    state = out.with_name(out.name + ".training")
    if out.exists() and not state.exists():
        raise ValueError(f"{out} exists, and {state} does not, which --resume needs; give another --out or delete it")
    if state.exists() and not options.resume:
        raise ValueError(f"{state} holds a training; continue it with --resume, or delete it")
    _of_its_kind(options)
    config = _config(options.target)

    import torch
    from transformers import AutoModelForCausalLM

    from vllm_adaptive_tree.heads import checkpoint
    from vllm_adaptive_tree.heads.dspark import Block
    from vllm_adaptive_tree.heads.eagle3 import Dimensions, auxiliary_layers
    from vllm_adaptive_tree.heads.kinds import block_head, eagle3_head, target_layers
    from vllm_adaptive_tree.heads.training import HeadRecipe, Training

    size = Dimensions.of(config)
    layers: tuple[int, ...] = ()
    if options.kind != "layers":
        # a dspark head reads outputs of layers, not the embeddings
        first = int(options.kind == "dspark")
        layers = auxiliary_layers(config["num_hidden_layers"], options.auxiliary_layers, first=first)
    mask = _mask(config, size.vocabulary)
    tokens, held_out = _tokens(options)
    print(f"{len(tokens):,} tokens to train on, {len(held_out):,} held out", flush=True)
    ids = options.draft_vocab and checkpoint.most_frequent(tokens, size.vocabulary, options.draft_vocab)
    recipe = HeadRecipe(
        minutes=options.minutes,
        unrolled=options.steps_unrolled or DEPTHS[options.kind],
        batch=options.batch,
        window=options.window,
        rate=options.rate,
        bfloat16=options.dtype == "bfloat16" if options.dtype else torch.cpu._is_avx512_bf16_supported(),
        compiled=options.compile,
    )
    block = Block(options.layers or 2, recipe.unrolled, options.markov_rank or 64, mask)
    count = options.layers or 3
    of_kind: dict[str, Any] = {
        "eagle3": {},
        "dspark": {"kind": "dspark", **block._asdict()},
        "layers": {"kind": "layers", "layers": count},
    }
    settings = {
        "target": shown(options.target),
        **of_kind[options.kind],
        "tokens": f"{len(tokens)} ({zlib.crc32(tokens.numpy().tobytes()):08x})",
        "draft_vocab": options.draft_vocab,
        "auxiliary_layers": layers,
        **{name: value for name, value in recipe._asdict().items() if name != "minutes"},
    }
    claim_folder(state / "manifest.json", settings, contents="the state")

    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    if options.kind == "eagle3":
        draft = eagle3_head(target, config, layers, ids)
    elif options.kind == "dspark":
        draft = block_head(target, config, layers, ids, block, tokens)
    else:
        draft = target_layers(target, config, count)
    training, saved = Training(draft.module, draft.teacher, tokens, held_out, recipe, state), state / "state.pt"
    if saved.exists():
        training.load(saved)
        done = training.seconds / 60
        print(f"continues at step {training.steps:,}, minute {done:.1f}", flush=True)
        if not out.exists():
            training.best = math.inf
        elif done >= options.minutes:
            raise ValueError(f"{out} was trained for {done:.1f} minutes; to go on, give more as --minutes")

    def keep(best: "Report") -> None:
        draft.write(out)
        record = {"python": platform.python_version(), **settings, "minutes": options.minutes}
        record |= _record(training, best)
        atomic_write(out / "training.json", (json.dumps(record, indent=2) + "\n").encode())

    training.run(save=saved, watch=_print, keep=keep)
    print(f"{out} is written; {state} can be deleted, or kept for more --minutes", file=sys.stderr)


def _of_its_kind(options: argparse.Namespace) -> None:
    """Check for options of the other kind; raises ValueError for one."""
    wrong = {
        "eagle3": ("layers", "markov_rank"),
        "dspark": (),
        "layers": ("steps_unrolled", "markov_rank", "draft_vocab", "auxiliary_layers"),
    }[options.kind]
    for name in wrong:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} means nothing for --kind {options.kind}; leave it out")


def _mask(config: dict[str, Any], vocabulary: int) -> int:
    """Mask token, which is read where a block predicts: the padding token, or else the end of a text.

    Raises:
        ValueError: the target's config.json names one that its vocabulary does not have.
    """
    end = config.get("eos_token_id")
    given = (config.get("pad_token_id"), next(iter(end), None) if isinstance(end, list) else end)
    found = next((token for token in given if token is not None), 0)
    if not 0 <= found < vocabulary:
        raise ValueError(
            f"--target: pad_token_id or eos_token_id {found} of its config.json is not among its {vocabulary} tokens; "
            "correct it"
        )
    return int(found)


def _tokens(options: argparse.Namespace) -> tuple["Tensor", "Tensor"]:
    """Tokens to train on and held-out tokens, flat."""
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


def _print(report: "Report") -> None:
    agreement = " ".join(f"{value:.3f}" for value in report.agreement)
    where = "held out" if report.held_out else f"{report.tokens_per_second:,.0f} tokens/s"
    print(
        f"{report.minutes:6.1f} min, step {report.steps:,}: loss {report.loss:.3f}, agreement {agreement}, {where}",
        flush=True,
    )


def _record(training: "Training", best: "Report") -> dict[str, Any]:
    """Content of `training.json` for a training and its best head so far."""
    return {
        "parameters": sum(weight.numel() for weight in training.head.parameters()),
        "steps": best.steps,
        "tokens_per_second": best.tokens_per_second,
        "held_out_loss": best.loss,
        "held_out_agreement_by_depth": best.agreement,
        "curve": [
            {"minutes": at.minutes, "steps": at.steps, "loss": at.loss, "agreement": at.agreement}
            for at in training.curve
        ],
    }
