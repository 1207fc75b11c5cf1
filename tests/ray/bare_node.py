"""A node of a Ray cluster whose environment lacks this package: a virtual environment with everything else."""

import contextlib
import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil


def environment(folder: Path) -> Path:
    """Create the environment and return its Python."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "vllm_adaptive_tree" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@contextlib.contextmanager
def joined(address: str, python: Path, folder: Path) -> Iterator[None]:
    """Run `ray start` in that environment, for the block."""
    command = [str(python), "-m", "ray.scripts.scripts", "start", "--block", "--address", address]
    command += ["--node-name", "bare", "--num-cpus", "5", "--object-store-memory", "100000000"]
    command += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "node.log").open("w") as log:
        node = psutil.Popen(command, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        for process in (*node.children(recursive=True), node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait(30)
