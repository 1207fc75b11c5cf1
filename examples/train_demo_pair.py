"""Train the bundled pair: a 6.4 M target and a 0.7 M draft Llama that share one tokenizer.

    python examples/train_demo_pair.py --out vllm_adaptive_tree/demo_pair

The text is what every machine with Python has: the standard library's sources and the language reference that ships in
`pydoc_data`. The target learns the text; the draft learns the target's laws (distillation). One module in 32 is held
out, chosen by a checksum of its name; the losses on it are written to `training.json`. It took 97 CPU minutes.
"""

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_adaptive_tree.heads.texts import is_held_out

VOCABULARY = 2048
END = "<|endoftext|>"
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"  # no chat model: texts in a row
SPECIALS = [END, "<|user|>", "<|assistant|>"]
CONTEXT, MICRO_BATCH, ACCUMULATE = 512, 4, 4  # tokens per step: 8,192
SKIP = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}  # tables, or not prose and code

Loss = Callable[[torch.Tensor], torch.Tensor]  # tokens [B, S] -> scalar


def documents() -> dict[str, str]:
    """Name -> text: one document per module, one per topic of the language reference."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIP.intersection(parts):
            found["/".join(parts)] = path.read_text(encoding="utf-8", errors="ignore")
    from pydoc_data.topics import topics

    return found | {f"topic {name}": text for name, text in topics.items()}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def llama(*, hidden: int, layers: int, mlp: int, heads: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=mlp,
            num_attention_heads=heads, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens, use_cache=False).logits.float()  # [B, S, V]


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Cross-entropy of the next token, nats per token."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> Loss:
    """KL(target || draft) per position, nats."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = logits(target, tokens).flatten(0, 1).log_softmax(-1)
        student = logits(draft, tokens).flatten(0, 1).log_softmax(-1)
        return F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    return loss


def batches(tokens: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Random windows [MICRO_BATCH, CONTEXT] of the flat text, ACCUMULATE per step."""
    window = torch.arange(CONTEXT)
    for _ in range(steps * ACCUMULATE):
        starts = torch.randint(0, len(tokens) - CONTEXT, (MICRO_BATCH, 1))
        yield tokens[starts + window]


def fit(model: LlamaForCausalLM, loss: Loss, tokens: torch.Tensor, *, steps: int, rate: float, name: str) -> None:
    """Muon on the matrices, AdamW on embeddings and norms; linear warm-up, cosine to 2 % of `rate`."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warmup = max(1, steps // 50)

    def scale(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    compiled = torch.compile(loss)
    source = batches(tokens, steps)
    smooth = None
    with tqdm(range(steps), desc=name, unit="step", file=sys.stdout, mininterval=5) as bar:
        for step in bar:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * scale(step)
            total = 0.0
            for _ in range(ACCUMULATE):
                part = compiled(next(source)) / ACCUMULATE
                part.backward()
                total += part.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            smooth = total if smooth is None else 0.98 * smooth + 0.02 * total
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)


@torch.no_grad()
def mean_loss(loss: Loss, tokens: torch.Tensor) -> float:
    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return sum(loss(w).item() * len(w) for w in windows.split(8)) / len(windows)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    dtype = model.dtype
    model.bfloat16().save_pretrained(folder)
    model.to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that receives target/, draft/ and training.json"
    )
    parser.add_argument("--target-steps", type=int, default=1300)
    parser.add_argument("--draft-steps", type=int, default=600)
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()

    texts = documents()
    kept = [text for name, text in texts.items() if not is_held_out(name)]
    tokenizer = train_tokenizer(kept)

    def flat(documents: list[str]) -> torch.Tensor:
        return torch.tensor([t for text in documents for t in [*tokenizer.encode(text), tokenizer.eos_token_id]])

    train, held_out = flat(kept), flat([text for name, text in texts.items() if is_held_out(name)])
    print(f"{len(train):,} tokens to train on, {len(held_out):,} held out", flush=True)

    target = llama(hidden=256, layers=8, mlp=704, heads=4)
    fit(target, text_loss(target), train, steps=options.target_steps, rate=3e-3, name="target")
    export(target, tokenizer, options.out / "target")
    target.requires_grad_(False)
    draft = llama(hidden=128, layers=2, mlp=352, heads=2)
    fit(draft, distillation_loss(draft, target), train, steps=options.draft_steps, rate=5e-3, name="draft")
    export(draft, tokenizer, options.out / "draft")

    report = {
        "python": sys.version.split()[0],
        "train_tokens": len(train),
        "held_out_tokens": len(held_out),
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "target_held_out_loss": mean_loss(text_loss(target), held_out),
        "draft_held_out_loss": mean_loss(text_loss(draft), held_out),
        "kl_target_draft_held_out": mean_loss(distillation_loss(draft, target), held_out),
        "minutes": (time.monotonic() - started) / 60,
    }
    (options.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
