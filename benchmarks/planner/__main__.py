"""The budget on recorded trees under simulated loads and costs, without an engine.

    python -m benchmarks.planner [FILE ...]    # recordings; those of `recorded/` unless named

A recording is made by `python -m benchmarks.planner.record`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planner import replay
from benchmarks.planner.recording import Recording, bundled


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 2 for a file that is no recording, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    files = parser.parse_args(arguments).files or bundled()
    try:
        recordings = [Recording.load(file) for file in files]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(replay.table(replay.compare(replay.POLICIES, replay.rows(recordings))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
