"""The texts that the bundled pair was trained on, as files: for training a head on them.

    python examples/demo_texts.py --out texts
    vllm-adaptive-tree train-head --text 'texts/**/*' --out head --minutes 55 --compile

The files' names keep the modules held out from the pair's training held out from the head's.
"""

import argparse
from pathlib import Path

from train_demo_pair import documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    for name, text in documents().items():
        file = options.out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
