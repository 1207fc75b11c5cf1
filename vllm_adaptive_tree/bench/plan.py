"""Plan of a run: configurations, cells (loads), and the engines that are alive together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

BASE = "no speculation"
MAX_ENGINES = 3
"""Most engines alive at a time: each holds its weights and its cache."""

Place = Literal["offline", "mixed", "server", "bursty", "first"]
"""Of a load. Mixed: offline, with answers of different lengths, so that requests do not end together."""
Role = Literal["base", "chain", "method", "stress draft"]
"""Roles of a configuration. A stress draft is an unusual one for a budget to handle; it runs offline and greedy."""


@dataclass(frozen=True, slots=True)
class Config:
    name: str
    role: Role
    speculation: dict[str, Any] | None  # vLLM's speculative_config

    @property
    def fixed(self) -> bool:
        """True if its trees do not depend on the load."""
        tree = (self.speculation or {}).get("tree", {})
        return self.role in ("base", "chain") or tree.get("budget", "auto") != "auto"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cell:
    place: Place
    concurrency: int  # of a bursty load: the highest
    sampled: bool = False  # else greedy
    requests: int | None = None  # of a round; None: the default of `workloads`
    temperature: float | None = None  # of sampled requests; None: the model's own sampling

    @property
    def name(self) -> str:
        load = f"1-{self.concurrency}" if self.place == "bursty" else str(self.concurrency)
        return f"{self.place} {load} {self._sampling.replace(' ', '')}"

    @property
    def title(self) -> str:
        who = "request at a time" if self.concurrency == 1 else "requests at a time"
        served = " through the server" if self.place == "server" else ""
        return f"{self.concurrency} {who}{served}, {self._sampling}"

    @property
    def _sampling(self) -> str:
        return "sampled" if self.sampled and self.temperature is None else f"T = {self.temperature or 0:g}"

    def runs(self, config: Config) -> bool:
        return config.role != "stress draft" or (self.place == "offline" and not self.sampled)


class Stage(NamedTuple):
    """Engines that are alive together, and the cells that they measure in turn."""

    served: bool  # through the server
    configs: tuple[Config, ...]
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return f"{'server' if self.served else 'offline'}: {', '.join(config.name for config in self.configs)}"


def groups(configs: Sequence[Config], alive: int = MAX_ENGINES) -> list[tuple[Config, ...]]:
    """Groups of the base with `alive` - 1 others: each method with a chain while there are chains, those of about 3
    tokens first. Where only chains are left, the first method takes the base's place, so that every chain is
    interleaved with a method; its ratio to the base goes through that.
    """
    base = next(config for config in configs if config.role == "base")
    methods = [config for config in configs if config.role == "method"]
    chains = sorted((config for config in configs if config.role == "chain"), key=lambda one: abs(_tokens(one) - 3))
    order: list[Config] = []
    while methods or chains:
        order += methods[:1] + chains[:1]
        methods, chains = methods[1:], chains[1:]
    order += [config for config in configs if config.role == "stress draft"]
    others = alive - 1
    parts = [order[start : start + others] for start in range(0, len(order), others)] or [[]]
    first = next((config for config in order if config.role == "method"), base)
    return [(first if part and all(one.role == "chain" for one in part) else base, *part) for part in parts]


def stages(configs: Sequence[Config], cells: Sequence[Cell]) -> list[Stage]:
    """Stages in the order in which they run: the most important first."""
    found = []
    for served in (False, True):
        own = [cell for cell in cells if (cell.place == "server") == served]
        for group in groups(configs):
            shared = tuple(cell for cell in own if any(cell.runs(config) for config in group[1:]) or len(group) == 1)
            running = tuple(config for config in group if any(cell.runs(config) for cell in shared))
            if shared:
                found.append(Stage(served, running, shared))
    return sorted(found, key=lambda stage: any(config.role == "stress draft" for config in stage.configs))


def _tokens(config: Config) -> int:
    return int((config.speculation or {}).get("num_speculative_tokens", 0))
