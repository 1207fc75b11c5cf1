"""Demo: a small benchmark that keeps all tokens, compares the texts, and shows drafted tokens and a tree."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from vllm_adaptive_tree.bench import models, tables
from vllm_adaptive_tree.bench.offline import Offline, Setup
from vllm_adaptive_tree.bench.plan import BASE, Cell, Config
from vllm_adaptive_tree.bench.process import EngineProcess
from vllm_adaptive_tree.bench.progress import Progress
from vllm_adaptive_tree.bench.results import Row, Series, rows, to_json
from vllm_adaptive_tree.bench.rounds import Measurement, Round
from vllm_adaptive_tree.bench.statistics import MIN_ROUNDS, total, total_ratio
from vllm_adaptive_tree.bench.workloads import prompt_indices
from vllm_adaptive_tree.proposers import RECOMMENDED
from vllm_adaptive_tree.report import viewer
from vllm_adaptive_tree.report.drawing import drawn
from vllm_adaptive_tree.report.tokens import Span, coloured, legend, spans

FLOAT32_TIE = 1e-5
"""Largest distance of two logits that counts as a tie in any dtype."""
TEMPERATURE = 0.8
"""Of the sampled requests."""
NUM_SHOWN = 1
"""Number of texts on the console."""
RESTING = 1.0
"""Nodes per step below which the draft mostly rests."""
COLUMNS: tables.Columns[Row] = {  # 80 characters
    **{name: tables.SPEED[name] for name in ("method", "tokens/step", "nodes/step")},
    "tokens/s": lambda row: f"{row.tokens_per_second.median:,.0f}",
    "ratio": tables.SPEED["vs. no speculation"],
    "identical": tables.SPEED["identical"],
}

SPEED_NOTE = (
    "tokens/s: of all prompts together, their reading included. ratio: to no speculation [90 % bootstrap interval]. "
    "Several requests at a time: their answers differ in length, and as one ends the next begins. chain: vLLM's own "
    "speculation with the same draft."
)


class Difference(NamedTuple):
    """A text that differs from the one without speculation."""

    load: str
    config: str
    prompt: int
    margin: float  # distance of the lower logit of the two tokens from the best one
    near_tie: bool

    def __str__(self) -> str:
        return f"{self.config}, {self.load}, prompt {self.prompt + 1}"


class DemoEngine(Offline):
    keep_tokens = True

    def about(self) -> dict[str, Any]:
        """Settings that the engine has chosen itself."""
        import torch

        return {"dtype": str(self.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}

    def read(self, steps: Sequence[list[int]]) -> tuple[str, list[Span]]:
        """Text of one request, and its drafted tokens; without the last step, which `max_tokens` may have cut."""
        tokenizer = self.llm.get_tokenizer()

        def decode(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=False))

        return decode(flat(steps)), spans(steps[:-1], decode)

    def tree(self) -> tuple[dict[str, Any], dict[str, str]] | None:
        """The step of a greedy request with the most accepted nodes, as recorded, and the texts of its tokens; None if
        the draft rests."""
        from vllm_adaptive_tree.engine.metrics.step_record import VARIABLE

        with TemporaryDirectory() as folder:
            file = Path(folder, "steps.jsonl")
            os.environ[VARIABLE] = str(file)
            try:
                self.llm.collective_rpc(_record)
            finally:
                del os.environ[VARIABLE]
            self.measure(next(iter(cells(1))), 0)
            try:
                record = viewer.read(file, most=1000)
            except ValueError:
                return None
        best = max(record["steps"], key=lambda step: (len(step["accepted"]), -step["verified"]))
        return best, record["texts"]

    def margin(self, prompt: int, ours: Sequence[int], theirs: Sequence[int]) -> tuple[float, bool]:
        """Distance of the lower logit of the two tokens from the best one, where two texts of a prompt first differ,
        and True if that is a near tie.

        A near tie: at most two steps of the dtype. The last bits depend on the number of rows of a forward.
        """
        import torch
        from vllm import SamplingParams

        at = first_difference(ours, theirs)
        text = {"prompt_token_ids": [*self.prompts[prompt], *ours[:at]]}
        output = self.llm.generate([text], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), use_tqdm=False)
        logits = {token: entry.logprob for token, entry in output[0].outputs[0].logprobs[0].items()}
        best = max(logits.values())
        margin = best - min(logits.get(token, -math.inf) for token in (ours[at], theirs[at]))
        step = torch.finfo(self.dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
        return margin, margin <= max(2 * step, FLOAT32_TIE)


def _record(worker: Any) -> None:
    """Begin to record the steps of a worker."""
    from vllm_adaptive_tree.engine.metrics.step_record import step_record

    runner = worker.model_runner
    runner.record = step_record(runner.vllm_config, runner.options)
    if runner.vllm_config.use_v2_model_runner:
        runner.speculator.record = runner.record


def configs(target: str, draft: str, *, chain: int, nodes: int) -> list[Config]:
    """Configurations: no speculation; vLLM's chain and an adaptive tree with the same `draft`, a model or a head."""
    tree = {"method": RECOMMENDED, "model": draft, "num_speculative_tokens": nodes}
    return [
        Config(BASE, "base", None),
        Config(f"chain of {chain}", "chain", models.chain(target, draft, chain)),
        Config(RECOMMENDED, "method", tree),
    ]


def cells(prompts: int) -> dict[Cell, int]:
    """Cells and their rounds: one prompt per round, greedy and sampled, each equally often; then as many requests at
    a time as there are prompts, half as many more in all."""
    alone = -(-MIN_ROUNDS // prompts) * prompts
    found = {Cell("offline", 1, requests=1): alone}
    found[Cell("offline", 1, sampled=True, requests=1, temperature=TEMPERATURE)] = alone
    return found if prompts == 1 else {**found, Cell("mixed", prompts, requests=3 * prompts // 2): MIN_ROUNDS}


class Demo:
    """Rounds of all `configs`, with every token; the first is the reference, the last one is shown."""

    def __init__(self, configs: Sequence[Config], setup: Setup, shown_prompts: Sequence[str]):
        """`shown_prompts`: the prompts as a reader sees them."""
        self.shown_prompts = shown_prompts
        self.configs, self.setup, self.cells = configs, setup, cells(len(setup.prompts))
        self.rounds = [
            Round("demo", cell.name, number, {}) for cell, count in self.cells.items() for number in range(1, count + 1)
        ]
        self.texts: dict[str, list[str]] = {}  # by configuration, one per prompt
        self.spans: list[list[Span]] = []  # of the last configuration, one list per prompt
        self.tree: tuple[dict[str, Any], dict[str, str]] | None = None
        self.differences: list[Difference] = []
        self.about: dict[str, Any] = {}

    def run(self, *, together: bool, progress: Progress) -> None:
        """Run the rounds. Engines that are alive `together` take turns, others follow each other.

        Raises RuntimeError if an engine fails, or vLLM's counters contradict the tokens that arrived.
        """
        progress.start(len(self.rounds) * len(self.configs))
        for alive in [self.configs] if together else [[one] for one in self.configs]:
            with ExitStack() as stack:
                engines = []
                for config in alive:
                    progress.note(f"{config.name}: an engine starts ...")
                    engine = EngineProcess(config, self.setup, None, DemoEngine)
                    engines.append((config, stack.enter_context(closing(engine))))
                for cell in self.cells:
                    for _, engine in engines:
                        engine.measure(replace(cell, requests=cell.concurrency), 0)  # warm-up
                    for one in self.rounds:
                        for config, engine in engines if one.cell == cell.name else []:
                            progress.say(f"{config.name}: {cell.title}")
                            one.measured[config.name] = found = engine.measure(cell, one.number)
                            check_counters(found, config)
                            progress.update()
                for config, engine in engines:
                    self._read(config, engine)
                    self.about = engine.call("about")

    def steps(self, cell: Cell, config: str) -> dict[int, list[list[list[int]]]]:
        """Prompt -> steps [step][token] of its requests, round by round."""
        found: dict[int, list[list[list[int]]]] = {index: [] for index in range(len(self.setup.prompts))}
        for one in self.rounds:
            if one.cell == cell.name:
                indices = prompt_indices(cell, one.number, len(found))
                for index, steps in zip(indices, one.measured[config].token_steps, strict=True):
                    found[index].append(steps)
        return found

    def _read(self, config: Config, engine: EngineProcess) -> None:
        """Fetch the greedy texts, and the margins of those that differ: per load and prompt the largest one."""
        first = self.steps(next(iter(self.cells)), config.name)
        read = [engine.call("read", requests[0]) for requests in first.values()]
        self.texts[config.name], self.spans = [text for text, _ in read], [spans for _, spans in read]
        if config.role == "method":
            self.tree = engine.call("tree")
        for cell in self.cells:
            for index, requests in {} if cell.sampled else self.steps(cell, config.name).items():
                reference = map(flat, self.steps(cell, BASE)[index])
                pairs = zip(map(flat, requests), reference, strict=True)
                margins = [engine.call("margin", index, *pair) for pair in pairs if pair[0] != pair[1]]
                if margins:
                    self.differences.append(Difference(cell.title, config.name, index, *max(margins)))

    def rows(self) -> list[Row]:
        """Speeds are those of all prompts together: each round has others."""
        found = []
        for row in rows(list(self.cells), self.configs, self.rounds):
            speeds = Series(next(cell for cell in self.cells if cell.name == row.cell), self.rounds).speeds
            own, speed = speeds(row.config), total(speeds(row.config))
            assert speed is not None
            base = row.to_base and total_ratio(own, speeds(BASE))
            chain = row.to_best_chain and total_ratio(own, speeds(self.configs[1].name))
            found.append(replace(row, tokens_per_second=speed, to_base=base, to_best_chain=chain))
        return found

    def show(self, settings: Mapping[str, Any]) -> None:
        """Print a coloured text and a tree, the tables, and what they come to."""
        console, table = Console(highlight=False), self.rows()
        for index, shown in enumerate(self.spans[:NUM_SHOWN]):
            console.rule(f"{self.configs[-1].name}, prompt {index + 1}", align="left", style="dim")
            console.print(Text.assemble((self._shown(index), "dim"), coloured(shown)), soft_wrap=True)
            console.print()
        if self.tree is not None:
            console.rule("one step: its tree, and the draft's probability of each branch", align="left", style="dim")
            console.print(drawn(*self.tree), "")
        console.rule(style="dim")
        console.print(legend(colours=console.color_system is not None and not console.no_color), "\n")
        tables.show(console, settings, tables.speed(list(self.cells), table, COLUMNS), self.notes(table))
        console.print("", *self.conclusion(table), sep="\n", soft_wrap=True)

    def _shown(self, index: int) -> str:
        """The prompt; a question stands on lines of its own."""
        shown = self.shown_prompts[index]
        return shown if shown == self.setup.prompts[index] else f"{shown}\n\n"

    def notes(self, table: Sequence[Row]) -> list[str]:
        found = [SPEED_NOTE, tables.TOKENS_NOTE, *tables.warnings(table)]
        if ties := [str(one) for one in self.differences if one.near_tie]:
            found.append(
                f"Not identical at near ties: {'; '.join(ties)}. There two tokens are equally likely up to rounding in "
                f"{self.about['dtype']}, and the number of rows in a forward decides, without speculation too: vLLM's "
                "text may change with the batch size."
            )
        return found

    def conclusion(self, table: Sequence[Row]) -> list[str]:
        """What the method gained in each cell, how many texts are the same, and what to type next."""
        chain, tree = self.configs[1:]
        found = []
        for cell in self.cells:
            of = {row.config: row for row in table if row.cell == cell.name}
            ours, theirs = of[tree.name], of[chain.name]
            assert ours.to_base is not None
            line = f"{cell.title}: {ours.to_base.median:.2f} times the speed of no speculation"
            if ours.to_best_chain is not None:
                line += f" and {ours.to_best_chain.median:.2f} times that of vLLM's {chain.name}"
            line += f"; {ours.tokens_per_step:.2f} tokens per step, chain {theirs.tokens_per_step:.2f}"
            rests = "; nodes do not pay here, so the draft mostly rests" if ours.nodes_per_step < RESTING else ""
            found.append(f"{line}{rests}.")
        texts = [steps for cell in self.cells if not cell.sampled for steps in self.steps(cell, tree.name).values()]
        compared = sum(map(len, texts))
        differing = len([one for one in self.differences if one.config == tree.name])
        same = f"The {compared} greedy texts are those of vLLM without speculation"
        found.append(f"{same}, but for near ties of {differing} prompts." if differing else f"{same}.")
        serve = json.dumps({**tree.speculation, "model": "DRAFT"})  # type: ignore[dict-item]
        return [
            *found,
            "Next: vllm-adaptive-tree demo --model TARGET --draft DRAFT, and in a server",
            f"vllm-adaptive-tree serve TARGET --speculative-config '{serve}'",
        ]

    def to_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Figures and texts of the demo."""
        return {
            **to_json(settings, self.rows(), [], {}),
            "prompts": list(self.setup.prompts),
            "texts": self.texts,
            "differences": [one._asdict() for one in self.differences],
            "rounds": [one.to_json() for one in self.rounds],
        }


def check_counters(found: Measurement, config: Config) -> None:
    """Check vLLM's counters; raises RuntimeError if they contradict the tokens that arrived.

    Accepted tokens are counted before `max_tokens` cuts the last step of a request.
    """
    nodes = config.speculation["num_speculative_tokens"] if config.speculation else 0
    accepted = found.decode_tokens - found.decode_steps
    cut = sum(nodes + 1 - len(steps[-1]) for steps in found.token_steps)
    if found.drafts > found.decode_steps or not accepted <= found.accepted <= accepted + cut:
        raise RuntimeError(
            f"vLLM counted {found.drafts} drafts and {found.accepted} accepted tokens, but {found.decode_steps} decode "
            f"steps with {accepted} tokens beyond the first arrived (at most {cut} may have been cut)"
        )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first token that differs; raises StopIteration if none does."""
    return next(at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)


def flat(steps: Sequence[list[int]]) -> list[int]:
    return [token for step in steps for token in step]
