"""Prompts for training gates on the bundled pair: places in the modules that the pair was trained on.

    python examples/demo_prompts.py --out prompts.txt

The modules held out from the pair's training stay held out here too, so that a benchmark on them has seen neither.
"""

import argparse
import random
import re
from pathlib import Path

from train_demo_pair import documents, is_held_out

CHARACTERS = 300


def prompts(count: int, seed: int = 0) -> list[str]:
    """Pieces of `CHARACTERS` characters from places drawn at random, no two from one module while others are left."""
    draw = random.Random(seed)
    texts = [text for name, text in sorted(documents().items()) if not is_held_out(name) and len(text) > 2000]
    found: list[str] = []
    while len(found) < count:
        for text in draw.sample(texts, len(texts)):
            start = draw.randrange(len(text) - CHARACTERS)
            piece = text[start : start + CHARACTERS].strip("\n")
            if piece.strip() and not re.search(r"^---[ \t]*$", piece, flags=re.MULTILINE):
                found.append(piece)
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=256)
    options = parser.parse_args()
    options.out.write_text("\n---\n".join(prompts(options.count)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
