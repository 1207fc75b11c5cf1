"""`python -m tests.next.diff 0.33.0` writes `patches/vllm-0.33.diff`: the diff of the minor before, carried over."""

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.next.overlay import ROOT, archive
from vllm_adaptive_tree.versions import SUPPORTED, minor


def diff(version: str) -> Path:
    return ROOT / "patches" / f"vllm-{minor(version)}.diff"


def main(release: str) -> None:
    minors = list(SUPPORTED)
    before = diff(minors[minors.index(minor(release)) - 1])
    files = re.findall(r"^--- a/(\S+)$", before.read_text(), re.MULTILINE)
    folder = Path(tempfile.mkdtemp())
    with tarfile.open(archive(release)) as tar:
        for member in tar:
            member.name = member.name.removeprefix(f"vllm-{release}/")
            if member.name in files:
                tar.extract(member, folder, filter="data")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=vllm", "-c", "user.email=vllm", *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", release)
    try:
        git("apply", "--reject", str(before))
    except subprocess.CalledProcessError as error:
        after = f"git diff > {diff(release)}"
        raise SystemExit(f"mend by hand what the .rej files in {folder} name; then, there: {after}") from error
    diff(release).write_text(git("diff"))


if __name__ == "__main__":
    main(sys.argv[1])
