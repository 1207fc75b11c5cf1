"""Target-initialised multi-candidate speculative decoding (Lu et al., arXiv 2409.10644)."""

from itertools import pairwise
from pathlib import Path

from benchmarks.papers.jobs import Job, Results, cell
from benchmarks.papers.judging import Estimate, difference, judge, ratio
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

T = 0.7
GRID = ([4, 2, 2, 1], [2, 2, 2, 1], [3, 3, 1, 1], [4, 3, 1, 1], [4, 4, 1, 1], [8, 2, 2, 1])
FORKS = (1, 2, 4, 8, 16)
THEIRS = {  # alpha at T = 0.7 of SD with 4 tokens, MCSD 4x2x2x1, and 2x4x3x1x1 (draft 68M)
    "LLaMA-2-7B, MT-Bench": (0.17, 0.29, 0.47),
    "LLaMA-2-7B, TriviaQA": (0.15, 0.21, 0.53),
    "LLaMA-2-7B, Alpaca": (0.20, 0.34, 0.52),
    "Vicuna-7B, MT-Bench": (0.18, 0.31, 0.40),
}
STOPS = ("none", "type1", "type2")


def jobs(scale: Scale) -> dict[str, Job]:
    found = {}

    def add(name: str, shape: list[int], **rest: object) -> None:
        nodes = _size(shape)
        found[name] = cell("mcsd", nodes, T, rule="rrsw", tree={"shape": shape, **rest}, **scale.sampled)

    add("config 1x1x1x1", [1, 1, 1, 1])
    for shape in scale.some(GRID, GRID[:1]):
        add(f"config {_named(shape)}", shape)
    for width in scale.some(FORKS, (1, 4)):
        add(f"fork {width}", [width, 1, 1, 1, 1])
    for stop in scale.some(STOPS, ("none", "type2")):
        add(f"stop {stop}", [4, 2, 1, 1, 1], **({} if stop == "none" else {"stop": stop}))
    return found


def section(r: Results, figures: Path) -> Section:
    claims = []
    parts = [
        f"T = {T}, children drawn without replacement, RRSw; the root is the target's own last token (target "
        "initialisation of width 1, the lossless one). alpha: accepted draft tokens over the depth of the tree. "
        "*1x1x1x1* is plain speculative decoding with four draft tokens."
    ]
    rows = []
    for name in [name for name in r if name.startswith("config ")]:
        shape = name.split()[1]
        rows.append(
            (shape, _size([int(k) for k in shape.split("x")]), ratio(r[name]), _alpha(r[name], shape.count("x") + 1))
        )
    parts.append(table(("k-config", "nodes", "tokens per step", "alpha"), rows))
    parts.append("The paper's alpha; 2x4x3x1x1 draws two initial tokens from the target, which is lossy:")
    parts.append(table(("pair and text", "SD", "4x2x2x1", "2x4x3x1x1"), [(k, *v) for k, v in THEIRS.items()]))
    plain = r["config 1x1x1x1"]
    for name in [name for name in r if name.startswith("config ") and name != "config 1x1x1x1"]:
        claims.append(
            judge(f"{name.split()[1]} > plain speculative decoding", difference(r[name], plain), REASONS["plain"])
        )

    widths = sorted(int(name.split()[1]) for name in r if name.startswith("fork "))
    parts.append("Width of a fork: W sequences of five tokens that branch at the root only.")
    rows = [(w, 5 * w, ratio(r[f"fork {w}"]), _alpha(r[f"fork {w}"], 5)) for w in widths]
    parts.append(table(("W", "nodes", "tokens per step", "alpha"), rows))
    for small, large in pairwise(widths):
        gain = difference(r[f"fork {large}"], r[f"fork {small}"])
        claims.append(judge(f"{large} sequences accept more than {small}", gain, REASONS["width"]))

    stops = [stop for stop in STOPS if f"stop {stop}" in r]
    parts.append(
        "Decision models on the k-config 4x2x1x1x1: growth ends behind a level for which the model believes in no "
        "sequence (threshold 0.4). Type 1 reads the draft's hidden state, type 2 entropy and the ten best "
        "probabilities; both are the bundled ones."
    )
    rows = []
    for stop in stops:
        one = r[f"stop {stop}"]
        rows.append((stop, ratio(one), ratio(one, "nodes").mean, ratio(one, "forwards").mean))
    parts.append(table(("model", "tokens per step", "nodes per step", "draft forwards per step"), rows))
    for stop in stops[1:]:
        none, one = r["stop none"], r[f"stop {stop}"]
        spared = difference(none, one, "forwards")
        claims.append(judge(f"{stop} spares draft forwards", spared, REASONS["stop"]))
        lost = difference(one, none)
        keeps = Estimate(*(x + 0.05 * ratio(none).mean for x in lost))
        claims.append(
            judge(
                f"{stop} keeps 95 % of the tokens per step",
                keeps,
                REASONS["kept"],
                shown=f"{lost.mean:+.3f} [{lost.low:+.3f}, {lost.high:+.3f}]",
            )
        )
    return Section("Target-initialised MCSD (arXiv 2409.10644)", parts, claims)


def _size(shape: list[int]) -> int:
    nodes, level = 0, 1
    for k in shape:
        level *= k
        nodes += level
    return nodes


def _named(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def _alpha(record: dict[str, list[float]], depth: int) -> float:
    return (ratio(record).mean - 1) / depth


REASONS = {
    "plain": "",
    "width": "each doubling adds less, as every sequence is less likely than the ones before",
    "stop": "",
    "kept": (
        "the model ends some growths that would have gone on; it spares draft forwards, and the paper too found no "
        "speed in that"
    ),
}
