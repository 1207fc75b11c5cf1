"""Packages installed on this node, and a comparison with those of another node."""

import importlib
import socket
import sys
from collections.abc import Mapping

from vllm_adaptive_tree.version import __version__, source_digest

NODE = "node"
"""Key of the node's name in an installation."""


def here() -> dict[str, str]:
    """The name of this node, and the version of every package that all nodes need in the same version."""
    import torch
    import vllm

    ours = f"{__version__} (source {source_digest()})"
    return {NODE: node(), "vllm-adaptive-tree": ours, "vllm": vllm.__version__, "torch": str(torch.__version__)}


def node() -> str:
    """The name of this machine, its address, and Ray's name for it if there is one."""
    host, ray = socket.gethostname(), sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized():
            return f"{host} ({ray.util.get_node_ip_address()}, Ray node {ray.get_runtime_context().get_node_id()})"
        return f"{host} ({importlib.import_module('vllm.utils.network_utils').get_ip()})"
    except Exception:
        return host


def difference(installed: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Description of how `installed` differs from `wanted`; None if it does not."""
    names = [name for name in wanted if name != NODE and installed.get(name) != wanted[name]]
    if not names:
        return None
    return f"on node {installed[NODE]} " + ", and ".join(
        f"{name} is {installed.get(name, 'missing')}, not {wanted[name]}" for name in names
    )


def check(wanted: Mapping[str, str]) -> None:
    """Compare the packages installed here with those of the node on which a configuration was made.

    Raises:
        RuntimeError: other packages are installed here; names the node and the remedy.
    """
    wrong = difference(here(), wanted)
    if wrong is not None:
        raise RuntimeError(
            f"A tree method needs the same packages on every node, and {wrong} as on node {wanted[NODE]}, which "
            "configured the engine; install on the first node what the second has, or remove the tree method from "
            "speculative_config"
        )
