"""Validated `tree` options: field checks, and the options common to all methods."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vllm_adaptive_tree.options import COUNT, Options, flag, is_count, number, option

GREEDY_DRAFT_TEMPERATURE = 0.6
"""Draft temperature for greedy requests with `draft_temperature: "auto"` while no budget fits one: raw probabilities
underestimate how often a greedy target takes the draft's best token."""


class Steered(NamedTuple):
    """Attributes of a proposer that the engine sets from measurements; all others are as the user wrote them."""

    measured: bool = False
    """`threshold`: once, to the cost of a draft level in target forwards."""
    price: bool = False
    """`threshold` and `floor`: in every step, from the tokens per second of the batch."""
    fill: bool = False
    """`steer`: between steps, so that trees fill a set fraction of the node budget."""
    temperature: bool = False
    """The draft temperature of greedy requests: between steps, fitted to the tokens the target takes."""


def draft_temperature(default: Any, *others: str) -> Any:
    """Option for a temperature. Below the least, float32 does not hold every quotient, and vLLM accepts none for a
    request; at the most, all tokens are almost equally likely."""
    return number(default, 0.01, 100, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions(Options):
    """Options common to all methods."""

    allow_lossy: bool = flag(default=False)
    """Allow a pair of proposer and rule that changes the target's distribution."""
    budget: int | str | None = option(
        "auto",
        lambda value: value in (None, "auto") or is_count(value),
        f"'auto' or {COUNT}",
    )
    """Nodes per step for the whole batch; "auto": as many as pay off by measured cost; None: every tree in full."""
    cost_profile: str | None = option(
        "auto",
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        "the path of a file, 'auto' or null",
    )
    """JSON file that keeps what `budget` "auto" measures and learns across processes; "auto": a file in vLLM's cache
    folder per pair, machine and method; None: nothing is kept."""

    lookup: ClassVar[str | None] = None
    """Look-up that is merged unless `tree` names another or null."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.cost_profile not in (None, "auto") and self.budget != "auto":
            raise ValueError(
                f"speculative_config['tree']['cost_profile'] is read and written with budget 'auto' only, got "
                f"{self.budget!r}; remove one of them"
            )

    @property
    def steered(self) -> Steered:
        return Steered()

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        """The draft temperature for a request of temperature `own` (0: greedy).

        `fitted`: the engine's current best value for greedy requests. Sampled children match the target best at the
        request's own temperature.
        """
        return own if own > 0 else 1.0

    def shipped(self) -> Path | None:
        """The bundled gate or vector that is used if these options need one and name none."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnscaledOptions(MethodOptions):
    """Options of methods whose deterministic trees are shaped by the unscaled distribution, unless `draft_temperature`
    says more."""

    draft_temperature: float = draft_temperature(1.0)

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        return self.draft_temperature


def existing_file(file: str | Path | None, key: str) -> Path:
    """The path of a file option; raises ValueError, naming the option, if there is no such file."""
    assert file is not None
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"speculative_config['tree'][{key!r}]: there is no file {file!r}")
    return path


def bundled(name: str) -> Path:
    """A file trained on the bundled demo pair."""
    return Path(__file__).parent / "defaults" / name
