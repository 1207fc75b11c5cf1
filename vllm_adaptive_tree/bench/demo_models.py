"""The models that the demo runs on: a chat model that people know with its head, or the small pair beside them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from vllm_adaptive_tree.bench.environment import HEAD, SMOLLM2_HEAD, TARGET, check_installed, shown
from vllm_adaptive_tree.bench.prompts import PROMPTS, parse
from vllm_adaptive_tree.files import cache_folder
from vllm_adaptive_tree.models.catalogue import MODELS
from vllm_adaptive_tree.models.fetch import fetch

ENLARGED = 500_000_000
"""Parameters of the bundled target, enlarged: at its own size nothing is worth a draft."""
QUESTIONS = parse(Path(__file__).with_name("questions.txt").read_text(encoding="utf-8"))
"""For a chat model; no head was trained on them."""


class DemoModels(NamedTuple):
    title: str
    """Of the target."""
    target: str
    draft: str
    prompts: tuple[str, ...]
    """What the engine gets."""
    shown: tuple[str, ...]
    """What a reader sees of them."""
    enlarged: int = 0
    """Parameters to which the target is enlarged; 0: it stays as it is."""
    small: bool = True
    """Three engines of the target fit into memory at once."""
    float32: bool = False
    """On any CPU: in bfloat16 some of its texts change with the number of rows of a forward, without drafts too."""


def bundled() -> DemoModels:
    """A small Llama of Python's standard library, and its head. Raises ValueError if they are not installed."""
    check_installed(TARGET)
    return DemoModels(shown(TARGET), TARGET, HEAD, PROMPTS, PROMPTS, ENLARGED)


def own(target: str, draft: str) -> DemoModels:
    return DemoModels(target, target, draft, PROMPTS, PROMPTS, small=False)


def smollm2(say: Callable[[str], None]) -> DemoModels:
    """SmolLM2-135M-Instruct, downloaded and converted if it is not there yet, and its head.

    Raises:
        ValueError: it cannot be had here.
        OSError: a file cannot be read or written.
    """
    check_installed(SMOLLM2_HEAD)
    folder = fetch("smollm2", cache_folder() / "models", say=say).folder
    prompts = chat_prompts(folder, QUESTIONS)
    return DemoModels(MODELS["smollm2"].title, str(folder), SMOLLM2_HEAD, prompts, QUESTIONS, float32=True)


def chat_prompts(model: Path, questions: Iterable[str]) -> tuple[str, ...]:
    """The questions in the chat template of a model."""
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(model).apply_chat_template
    return tuple(
        template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        for question in questions
    )


def best_available(say: Callable[[str], None]) -> DemoModels:
    """SmolLM2 if it can be had, else the bundled pair, after one line that says why."""
    try:
        return smollm2(say)
    except (ValueError, OSError) as error:
        say(f"without {MODELS['smollm2'].title}, on the bundled pair: {error}")
        return bundled()
