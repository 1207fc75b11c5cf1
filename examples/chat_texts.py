"""Chats that a chat model writes by itself, as files: for training a draft or a head on the target's own answers.

    python examples/chat_texts.py --model "$(vllm-adaptive-tree fetch-model smollm2)" --out texts --chats 4800
    vllm-adaptive-tree train-head --target ... --text 'texts/*.txt' --out head --minutes 120

The model writes the questions too: it continues its template's user header, as in Magpie (Xu et al. 2024,
arXiv:2406.08464). A third of them are free; a third begin as requests do; a third are functions of the
standard library without their bodies. Answers are drawn at T = 0, 0.7 and 1 in turn. One chat in five is held out:
`held_out.json` has its question, for benchmarks. A second call continues where the first one was interrupted.
"""

import argparse
import ast
import inspect
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from vllm import LLM, SamplingParams

CHUNK = 192  # chats that are written together
HELD_OUT = 5  # one chat in
TEMPERATURES = (0.0, 0.7, 1.0)
OPENINGS = (
    "Write a Python function",
    "Write a function that",
    "How do I",
    "Explain how",
    "Write an email",
    "What is the difference between",
)
COMPLETE = "Complete this Python function.\n\n```python\n{}\n```"


def functions() -> list[str]:
    """Signatures and docstrings of the standard library's functions."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if doc and len(doc) < 400:
                signature = f"def {node.name}({ast.unparse(node.args)}):"  # type: ignore[attr-defined]
                found.append(f'{signature}\n    """{textwrap.indent(inspect.cleandoc(doc), "    ").strip()}\n    """')
    return found


def openings(number: int, known: list[str]) -> Iterator[str]:
    """The beginnings of the questions of one chunk; whole questions end with a newline."""
    chance = random.Random(number)
    for i in range(CHUNK):
        if i % 3 == 0:
            yield ""
        elif i % 3 == 1:
            yield chance.choice(OPENINGS)
        else:
            yield COMPLETE.format(chance.choice(known)) + "\n"


def write(model: LLM, number: int, known: list[str], longest: int) -> tuple[list[str], list[str]]:
    """Chats to train on and held-out questions of chunk `number`."""
    tokenizer = model.get_tokenizer()
    marker = "QUESTION"
    shape = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    header, _ = shape.split(marker)
    begun = list(openings(number, known))
    ask = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=96, seed=number)
    open_ended = [i for i, text in enumerate(begun) if not text.endswith("\n")]
    rest = model.generate([header + begun[i] for i in open_ended], ask, use_tqdm=False)
    questions = list(begun)
    for i, output in zip(open_ended, rest, strict=True):
        questions[i] += output.outputs[0].text
    questions = [text.strip() for text in questions]
    kept = [(i, text) for i, text in enumerate(questions) if text]
    held_out = [text for i, text in kept if i % HELD_OUT == 0]
    kept = [(i, text) for i, text in kept if i % HELD_OUT]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for _, text in kept
    ]
    how = [
        SamplingParams(
            temperature=TEMPERATURES[i // 3 % len(TEMPERATURES)],
            max_tokens=longest,
            seed=i,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )
        for i, _ in kept
    ]
    answers = model.generate(prompts, how, use_tqdm=False)
    chats = [prompt + answer.outputs[0].text for prompt, answer in zip(prompts, answers, strict=True)]
    return chats, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--chats", type=int, default=4800, help="with those held out (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=320, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="at a time (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    questions = options.out / "held_out.json"
    held_out: dict[str, list[str]] = json.loads(questions.read_text()) if questions.exists() else {}
    known = functions()
    model = LLM(
        options.model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=options.requests,
        enforce_eager=True,
        gpu_memory_utilization=0.4,  # leaves room for another engine beside it
    )
    for number in range(options.chats // CHUNK):
        if f"{number:04}" in held_out:
            continue
        chats, held_out[f"{number:04}"] = write(model, number, known, options.longest)
        for i, chat in enumerate(chats):
            (options.out / f"{number:04}-{i:03}.txt").write_text(chat, encoding="utf-8")
        questions.write_text(json.dumps(held_out, indent=1))
        print(f"{(number + 1) * CHUNK} of {options.chats}", flush=True)


if __name__ == "__main__":
    main()
