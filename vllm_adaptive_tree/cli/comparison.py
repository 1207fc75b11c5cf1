"""Methods side by side: what each generated under each load, as tables and as figures."""

import platform
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_adaptive_tree.cli.generation import About, Generation, Load
from vllm_adaptive_tree.version import __version__

if TYPE_CHECKING:
    from vllm_adaptive_tree.report.table import Row

SHOWN = 2  # texts
ENOUGH_CORE = 0.85  # of its threads' time, for a time worth comparing


class Method(NamedTuple):
    name: str
    speculative_config: dict[str, Any] | None


class NamedDifference(NamedTuple):
    load: str
    method: str
    request: int
    margin: float
    near_tie: bool


class Comparison(NamedTuple):
    size: int  # parameters of an enlarged target, 0: as it is
    methods: Sequence[Method]  # the first is the reference, the last one's text is shown
    loads: Sequence[Load]
    prompts: Sequence[str]
    generations: Sequence[Sequence[Generation]]  # [load][method]

    @property
    def about(self) -> About:
        return self.generations[0][0].about

    def differences(self) -> Iterator[NamedDifference]:
        """From the text without speculation."""
        for load, runs in zip(self.loads, self.generations, strict=True):
            for method, run in zip(self.methods, runs, strict=True):
                yield from (NamedDifference(load.name, method.name, *difference) for difference in run.differences)

    def rows(self, generations: Sequence[Generation]) -> list["Row"]:
        from vllm_adaptive_tree.report.table import Row

        return [
            Row(
                method=method.name,
                tokens_per_step=run.tokens_per_step,
                nodes_per_step=run.nodes_per_step,
                tokens_per_second=run.tokens_per_second,
                ratio=run.tokens_per_second / generations[0].tokens_per_second,
                identical=not run.differences,
            )
            for method, run in zip(self.methods, generations, strict=True)
        ]

    def print_texts(self, console: Any) -> None:
        from rich.text import Text

        from vllm_adaptive_tree.report.tokens import coloured, legend

        shown = list(zip(self.prompts, self.generations[0][-1].spans, strict=True))[:SHOWN]
        for index, (prompt, spans) in enumerate(shown, 1):
            console.rule(f"{self.methods[-1].name}, prompt {index}", align="left", style="dim")
            console.print(Text.assemble((prompt, "dim"), coloured(spans)), soft_wrap=True)
            console.print()
        console.rule(style="dim")
        console.print(legend(colours=console.color_system is not None and not console.no_color), "\n")

    def print_tables(self, console: Any) -> None:
        from vllm_adaptive_tree.report.table import remark, table

        for load, runs in zip(self.loads, self.generations, strict=True):
            rows = self.rows(runs)
            console.print(f"[bold]{load.name}[/bold]", table(rows), "", sep="\n")
            for text in filter(None, (remark(rows), self.ties(load))):
                console.print(text, "", sep="\n")

    def ties(self, load: Load) -> str | None:
        """What to say about texts that differ at near ties."""
        found = [
            f"{difference.method} at prompt {difference.request + 1}"
            for difference in self.differences()
            if difference.load == load.name and difference.near_tie
        ]
        if not found:
            return None
        return (
            f"Not identical at near ties: {'; '.join(found)}. There two tokens are equally likely up to rounding in "
            f"{self.about.dtype}, and the number of rows in a forward decides, without speculation too: vLLM's text "
            "may change with the size of the batch."
        )

    def print_conditions(self, console: Any) -> None:
        tokens, threads = len(self.generations[0][0].tokens[0][0]), self.about.threads
        rounds = max(load.rounds for load in self.loads)
        console.print(
            f"{len(self.prompts)} prompts, {tokens} new tokens each, greedy, {self.about.dtype}, {threads} "
            f"{'thread' if threads == 1 else 'threads'}; tokens/s include reading the prompts"
            + (f", of several requests at a time the median of {rounds} rounds." if rounds > 1 else ".")
        )
        cores = min(runs[0].core_share for runs in self.generations)
        if cores < ENOUGH_CORE and self.about.in_process:
            console.print(
                f"Other programs kept the cores busy (without speculation the engine got {cores:.0%} of its threads' "
                "time): do not trust tokens/s here."
            )

    def versions(self) -> dict[str, str]:
        import torch

        return {
            "vllm_adaptive_tree": __version__,
            "vllm": self.about.vllm,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def figures(self, shown: Callable[[str], str]) -> list[dict[str, Any]]:
        """Per load and method; models as `shown`."""
        return [
            load._asdict()
            | {
                "methods": [
                    row._asdict()
                    | {
                        "speculative_config": config and config | {"model": shown(config["model"])},
                        "seconds": run.seconds,
                        "cpu_seconds": run.cpu_seconds,
                        "counters": run.counters,
                        "differences": [difference._asdict() for difference in run.differences],
                        "texts": run.texts,
                    }
                    for row, (_, config), run in zip(self.rows(runs), self.methods, runs, strict=True)
                ]
            }
            for load, runs in zip(self.loads, self.generations, strict=True)
        ]
