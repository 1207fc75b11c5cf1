"""Check of a release's tag: `python -m tools.release v0.2.0`; `--notes FILE` writes the changelog's section.

It ends with 1 and the reason if the tag is not the version of the package, if the changelog has no section for it, or
if `RELEASING.md` does not name the vLLM that it supports.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_adaptive_tree.version import __version__
from vllm_adaptive_tree.versions import window

ROOT = Path(__file__).parents[1]


def problems(tag: str, version: str, changelog: str, releasing: str) -> list[str]:
    """Reasons against a release of `tag`; `version` is the package's, the others are texts of files."""
    found = []
    if tag != f"v{version}":
        found.append(
            f"the tag is {tag}, and vllm_adaptive_tree/version.py says {version}: the tag has to be v{version}"
        )
    if not re.search(rf"^## {re.escape(version)}$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## {version}'")
    minor = ".".join(version.split(".")[:2])
    if f"\n| {minor} | {window()} |\n" not in releasing:
        found.append(f"the table of RELEASING.md has no row '| {minor} | {window()} |'")
    return found


def section(version: str, changelog: str) -> str:
    """What the changelog says of a release, without its heading."""
    _, _, rest = changelog.partition(f"\n## {version}\n")
    return rest.partition("\n## ")[0].strip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    tag = options.tag
    changelog, releasing = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "RELEASING.md"))
    found = problems(tag, __version__, changelog, releasing)
    if options.notes and not found:
        options.notes.parent.mkdir(parents=True, exist_ok=True)
        options.notes.write_text(section(__version__, changelog))
    print("\n".join(found) or f"{tag} may be released, for vLLM {window()}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
