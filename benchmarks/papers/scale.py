from typing import NamedTuple


class Scale(NamedTuple):
    """Size of the measurement."""

    quick: bool
    prompts: int  # greedy cells
    sampled_prompts: int  # cells with T > 0, which two sources of noise blur
    tokens: int

    def some(self, everything: tuple, few: tuple) -> tuple:  # type: ignore[type-arg]
        return few if self.quick else everything

    def draws(self, count: int) -> int:
        """Sets of random numbers that a sampled cell is decoded with."""
        return 1 if self.quick else count

    @property
    def few(self) -> dict[str, int]:
        """For cells that are many or slow: two cuts of every file."""
        return {"prompts": min(32, self.prompts), "tokens": self.tokens}

    @property
    def greedy(self) -> dict[str, int]:
        return {"prompts": self.prompts, "tokens": self.tokens}

    @property
    def sampled(self) -> dict[str, int]:
        return {"prompts": self.sampled_prompts, "tokens": self.tokens}


FULL = Scale(quick=False, prompts=64, sampled_prompts=64, tokens=64)
SMOLLM2 = Scale(quick=False, prompts=24, sampled_prompts=24, tokens=32)
QUICK = Scale(quick=True, prompts=6, sampled_prompts=6, tokens=24)
