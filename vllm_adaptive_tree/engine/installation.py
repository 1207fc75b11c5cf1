"""What is installed on this node, and whether another node has the same.

The text of this file travels in every configuration of a tree method (`mark.Mark`) and runs where one is unpickled,
also on nodes without this package or with another version of it. So it imports the standard library only, and anything
else inside a `try`.
"""

import hashlib
import importlib
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = {"vllm-adaptive-tree": "vllm_adaptive_tree", "vllm": "vllm", "torch": "torch"}
"""Distribution -> module."""
OURS = "vllm_adaptive_tree"
NODE = "node"
"""The key of the node's name in an installation."""


def here() -> dict[str, str]:
    """The name of this node, and the version of every package that all nodes need in the same version."""
    found = {NODE: node()}
    for distribution, name in PACKAGES.items():
        try:
            module = importlib.import_module(name)
            found[distribution] = f"{module.__version__}{f' (source {_source(module)})' if name == OURS else ''}"
        except Exception as error:  # any module may have that name
            found[distribution] = f"missing ({type(error).__name__}: {error})"
    return found


def node() -> str:
    """The name of this machine, its address, and Ray's name for it if there is one."""
    host, ray = socket.gethostname(), sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized():
            return f"{host} ({ray.util.get_node_ip_address()}, Ray node {ray.get_runtime_context().get_node_id()})"
        return f"{host} ({importlib.import_module('vllm.utils.network_utils').get_ip()})"
    except Exception:
        return host


def difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """How `found` differs from `wanted`; None if it does not."""
    names = [name for name in wanted if name != NODE and found.get(name) != wanted[name]]
    if not names:
        return None
    return f"on node {found[NODE]} " + ", and ".join(
        f"{name} is {found.get(name, 'missing')}, not {wanted[name]}" for name in names
    )


def arrive(wanted: Mapping[str, str]) -> Any:
    """Called when a configuration of a tree method reaches this process; `wanted`: the installation it comes from.

    Raises:
        RuntimeError: something else is installed here; names the node, and what to do.
    """
    wrong = difference(here(), wanted)
    if wrong is not None:
        raise RuntimeError(
            f"A tree method needs the same packages on every node, and {wrong} as on node {wanted[NODE]}, which "
            "configured the engine; install on the first node what the second has, or remove the tree method from "
            "speculative_config"
        )
    return importlib.import_module(f"{OURS}.engine.mark").installed()


def _source(package: ModuleType) -> str:
    """A digest of a package's files: a checkout keeps its version from commit to commit."""
    assert package.__file__ is not None
    folder, digest = Path(package.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())
    return digest.hexdigest()[:8]
