"""Texts on which tokenizers differ: code, numbers, special tokens, scripts of the world, white space."""

import os
import random
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

STDLIB = Path(os.__file__).parent
SAMPLE = ("argparse.py", "ast.py", "colorsys.py", "decimal.py", "difflib.py", "textwrap.py", "typing.py", "zipfile.py")
WORDS = (
    *(
        "the",
        "I'll",
        "DON'T",
        "we've",
        "it's",
        "\u2019s",
        "a_b",
        "__init__",
        "na\u00efve",
        "e\u0301",
        "Straße",
        "—",
        "…",
    ),
    *("北京", "привет", "Ελλάδα", "שלום", "مرحبا", "한국어", "ไทย", "हिन्दी", "🙂", "👩\u200d👩\u200d👧", "🇩🇪"),
)
DIGITS = "0123456789" + "٠١٢٣" + "०१२" + "²³¹" + "½¾" + "ⅧⅫ" + "①⓴" + "一二" + "\U0001d7d8\U0001d7e1"
SPACES = (" ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", " \n ", "\x0b", "")
PARTS = ("<|", "|>", "<", "im_start", "<|im_start", "|im_end|>", "<|IM_END|>", "user\n", "assistant\n", " ", "x", "1")
ASSIGNED = [chr(point) for point in range(0x20, 0x20000) if unicodedata.category(chr(point)) not in ("Cn", "Cs", "Co")]


def texts(count: int, special: Sequence[str], seed: int = 0) -> list[str]:
    """`special`: tokens that are no text."""
    draw = random.Random(seed)
    sources = [file.read_text(encoding="utf-8") for name in SAMPLE if (file := STDLIB / name).is_file()]

    def joined(part: Callable[[], str], most: int) -> str:
        return "".join(part() for _ in range(draw.randint(1, most)))

    def code() -> str:
        source = draw.choice(sources)
        start = draw.randrange(max(1, len(source) - 1_000))
        return source[start : start + draw.randint(1, 1_000)]

    def number() -> str:
        return draw.choice((draw.choice(DIGITS), str(draw.random()), hex(draw.getrandbits(40)), *"-.,:/ $%e"))

    kinds: tuple[Callable[[], str], ...] = (
        code,
        lambda: joined(number, 30),
        lambda: joined(lambda: draw.choice((*special, *PARTS)), 12),
        lambda: joined(lambda: draw.choice((draw.choice(ASSIGNED), draw.choice(WORDS), " ")), 30),
        lambda: joined(lambda: draw.choice(WORDS) + draw.choice(SPACES), 15),
    )
    return [kinds[index % len(kinds)]() for index in range(count)]
