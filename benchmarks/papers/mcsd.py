"""Target-initialised multi-candidate speculative decoding (Lu et al., arXiv 2409.10644)."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.papers.bootstrap import Estimate, Record, costed, difference, ratio, relative
from benchmarks.papers.jobs import Results, Work, cell
from benchmarks.papers.judging import OURS, Claim, Source
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

PAPER = "Target-initialised MCSD (arXiv 2409.10644)"
T, MU = 0.7, 0.1
MARGIN = 0.1  # of a log probability
SHARE = 0.05  # of tokens or speed, that counts as none
SD, MCSD, LOSSLESS, LOSSY, WIDER = "1x1x1x1", "4x2x2x1", "4x3x1x1", "2+4x3x1x1", "3+4x3x1x1"
HEADLINE = (SD, MCSD, LOSSLESS, LOSSY, WIDER)
GRID = ("2x2x2x1", "3x3x1x1", "4x4x1x1", "8x2x2x1")
INITIALISED = ("2+4x4x1x1", "2+1x1x1x1")
FORKS = (1, 2, 4, 8, 16)
WIDE = "16+1x1x1x1x1"
STOPS = ("none", "type1", "type2")
THEIRS = {  # alpha at T = 0.7 of SD with 4 tokens, MCSD 4x2x2x1, and 2x4x3x1x1 (draft 68M)
    "LLaMA-2-7B, MT-Bench": (0.17, 0.29, 0.47),
    "LLaMA-2-7B, TriviaQA": (0.15, 0.21, 0.53),
    "LLaMA-2-7B, Alpaca": (0.20, 0.34, 0.52),
    "Vicuna-7B, MT-Bench": (0.18, 0.31, 0.40),
}
ALPHA = {
    (MCSD, SD): Source("Table 2, MCSD beside SD", "alpha 0.17 -> 0.29 (7B, MT-Bench)", headline=True),
    (LOSSY, MCSD): Source("Table 2, 2x4x3x1x1 beside MCSD", "alpha 0.29 -> 0.47 (7B, MT-Bench)", headline=True),
}
OTHERS = Source("Tables 3 and 4, T = 1", "alpha SD .11-.14, MCSD .20-.23")
FORK = Source("Tables 3 and 4, T = 1, D = 5 and W = 16", "alpha .74-.80 beside MCSD's .20-.23", headline=True)
QUALITY = Source("Table 1", "6.29 at W0 = 1, 5.83 at 2, 5.69 at 3 (68M)", headline=True)
KEPT = Source("Table 1, W0 = 1 keeps the score", "within 0.05", headline=True)
CONFIGS = Source(
    "2x4x3x1x1 is the best of the grid; figures of the authors' code", "alpha .473; 2x4x4x1x1 .468, 2x1x1x1x1 .156"
)
SPEED = Source('abstract, "a maximum 27.5% speedup compared to our MCSD baseline"', "up to +27.5 %", headline=True)
STOP = Source("Figures 7 and 8, the decision model brings no speed", "curves")


def jobs(scale: Scale) -> dict[str, Work]:
    found: dict[str, Work] = {}

    def add(name: str, t: float, own: dict[str, int] = scale.sampled, **rest: Any) -> None:
        width, shape = _parsed(name)
        tree = {"shape": shape, **rest} | ({"init_width": width, "allow_lossy": True} if width > 1 else {})
        nodes = sum(_layers(shape)) * width + (width if width > 1 else 0)
        likely = {"keep_likelihood": True} if name in (*HEADLINE, *INITIALISED, WIDE) else {}
        key = f"{name} {t:g}" + (f" {rest['stop']}" if rest else "")
        found[key] = cell("mcsd", nodes, t, rule="rrsw", tree=tree, **likely, **own)

    for name in (SD, MCSD, LOSSLESS, LOSSY):
        add(name, T)
        for t in scale.some((0.0, 1.0), ()):
            add(name, t, scale.few if t else scale.greedy)
    for name in scale.some((WIDER, *GRID), ()):
        add(name, T)
    for name in scale.some(INITIALISED, ()):
        add(name, T, scale.few)
    for t in scale.some((0.0, 1.0), ()):
        add(WIDE, t, scale.few | {"prompts": 15})
    for stop in scale.some(STOPS[1:], ()):
        add(WIDE, 1.0, scale.few | {"prompts": 15}, stop=stop)
    for width in scale.some(FORKS, (1, 4)):
        add(_fork(width), T)
    for stop in scale.some(STOPS, ("none", "type2")):
        add("4x2x1x1x1", T, **({} if stop == "none" else {"stop": stop}))
    return found


def section(r: Results, figures: Path) -> Section:
    claims: list[Claim] = []
    temperatures = [t for t in (T, 0.0, 1.0) if f"{SD} {t:g}" in r]
    parts = [
        "Children drawn without replacement, RRSw. *2+4x3x1x1* is the paper's 2x4x3x1x1: two initial tokens of the "
        "target above the k-config 4x3x1x1, which is lossy; without a plus the root is the target's own last token "
        "(target initialisation of width 1, the lossless one). alpha: accepted draft tokens over the k-config's "
        "depth. *1x1x1x1* is plain speculative decoding with four draft tokens. Quality: the target's mean log "
        "probability, at temperature 1, of a token of the text that comes out. It stands for the paper's MT-Bench "
        "score, which models of this size have not. At T > 0 the first initial token of a step is the one that "
        "verification leaves, and the others are drawn from the target's plain law there without it, not from a "
        "residual, in the simulation as in the engine.",
    ]
    rows: list[tuple[object, ...]] = []
    for t in temperatures:
        for name in (*HEADLINE, *GRID, *INITIALISED, WIDE):
            if (record := r.get(f"{name} {t:g}")) is not None:
                likely = _signed(ratio(record, "likelihood", "tokens")) if "likelihood" in record else None
                figures_ = (ratio(record), _alpha(record, name), ratio(record, "forwards"), likely)
                rows.append((f"{t:g}", name, ratio(record, "nodes").mean, *figures_))
    heads = ("T", "k-config", "nodes", "tokens per step", "alpha", "draft forwards per step", "quality")
    parts += [table(heads, rows), "The paper's alpha, T = 0.7:"]
    parts.append(table(("pair and text", "SD", "4x2x2x1", "2x4x3x1x1"), [(k, *v) for k, v in THEIRS.items()]))
    for t in temperatures:

        def at(name: str, t: float = t) -> Record:
            return dict(r[f"{name} {t:g}"])

        for (a, b), source in ALPHA.items():
            gain = _over(difference(at(a), at(b)), 4)
            claims.append(_at(t, source).judge(f"alpha: {a} > {b} (T = {t:g})", gain))
        if t > 0:  # greedily both give the same text
            lossless = difference(at(MCSD), at(SD), "likelihood", "tokens")
            text = f"quality of {MCSD} is that of {SD} (T = {t:g})"
            claims.append(KEPT.judge_equal(text, lossless, MARGIN))
        for a, b in ((LOSSLESS, LOSSY), (LOSSY, WIDER)):
            if f"{b} {t:g}" in r:
                text = f"quality falls from {a} to {b} (T = {t:g})"
                claims.append(QUALITY.judge(text, difference(at(a), at(b), "likelihood", "tokens"), SAMPLED))
        if f"{WIDE} {t:g}" in r:
            gain = difference(_rated(at(WIDE), 5), _rated(at(MCSD), 4), "rate")
            claims.append((FORK if t else OURS).judge(f"alpha: {WIDE} > {MCSD} (T = {t:g})", gain))
    gain = relative(costed(r[f"{LOSSY} {T}"], MU), costed(r[f"{MCSD} {T}"], MU), "tokens", "cost")
    text = f"{LOSSY} is faster than {MCSD}, modelled (T = {T:g}, mu = {MU:g})"
    claims.append(SPEED.judge(text, gain, shown=gain.percent()))
    for name in [name for name in INITIALISED if f"{name} {T}" in r]:
        gain = _over(difference(r[f"{LOSSY} {T}"], r[f"{name} {T}"]), 4)
        claims.append(CONFIGS.judge(f"alpha: {LOSSY} > {name} (T = {T:g})", gain))

    widths = [width for width in FORKS if f"{_fork(width)} {T}" in r]
    parts.append(
        f"Width of a fork: W sequences of five tokens that branch at the root only, T = {T}. The paper's Figure 6 is "
        "of target-initialised sequences; these are the draft's."
    )
    rows = [(w, 5 * w, ratio(r[f"{_fork(w)} {T}"]), _alpha(r[f"{_fork(w)} {T}"], _fork(w))) for w in widths]
    parts.append(table(("W", "nodes", "tokens per step", "alpha"), rows))
    for small, large in pairwise(widths):
        gain = difference(r[f"{_fork(large)} {T}"], r[f"{_fork(small)} {T}"])
        claims.append(OURS.judge(f"{large} sequences accept more than {small}", gain, LESS))
    parts += _stops(r, claims) + _whole(r, claims)
    return Section(PAPER, PAPER, parts, claims)


def _at(t: float, source: Source) -> Source:
    """Whose line it is: the paper finds no significant improvement with greedy candidates."""
    return {T: source, 0.0: OURS}.get(t, OTHERS)


def _stops(r: Results, claims: list[Claim]) -> list[str]:
    found = {stop: r[key] for stop in STOPS if (key := f"4x2x1x1x1 {T}" + (f" {stop}" if stop != "none" else "")) in r}
    rows = [
        (
            stop,
            ratio(one),
            ratio(one, "nodes").mean,
            ratio(one, "forwards").mean,
            ratio(costed(one, MU), "tokens", "cost"),
        )
        for stop, one in found.items()
    ]
    none = found.pop("none")
    for stop, one in found.items():
        lead = relative(costed(none, MU), costed(one, MU), "tokens", "cost")
        text = f"without a decision model at least 95 % of the speed with {stop}, modelled (mu = {MU:g})"
        claims.append(STOP.judge(text, lead, SPARES, least=-SHARE, shown=lead.percent()))
        claims.append(OURS.judge(f"{stop} spares draft forwards", difference(none, one, "forwards")))
        kept = relative(one, none)
        text = f"{stop} keeps 95 % of the tokens per step"
        claims.append(OURS.judge(text, kept, SPARES, least=-SHARE, shown=kept.percent()))
    heads = ("model", "tokens per step", "nodes per step", "draft forwards per step", f"speed at mu = {MU:g}")
    return [
        f"Decision models on the k-config 4x2x1x1x1, T = {T}: growth ends behind a level for which the model "
        "believes in no sequence (threshold 0.4). Type 1 reads the draft's hidden state, type 2 entropy and the ten "
        "best probabilities; both are the bundled ones. Speed is modelled as tokens / (1 + mu * draft forwards).",
        table(heads, rows),
    ]


def _whole(r: Results, claims: list[Claim]) -> list[str]:
    """Target initialisation, a fork and a decision model in one cell."""
    found = {stop: r[key] for stop in STOPS[1:] if (key := f"{WIDE} 1 {stop}") in r}
    if not found:
        return []
    none, rows = r[f"{WIDE} 1"], []
    for stop, one in {"none": none, **found}.items():
        quality, speed = _signed(ratio(one, "likelihood", "tokens")), ratio(costed(one, MU), "tokens", "cost")
        rows.append((stop, ratio(one), _alpha(one, WIDE), ratio(one, "forwards").mean, quality, speed))
    for stop, one in found.items():
        gain = difference(_rated(one, 5), _rated(r[f"{MCSD} 1"], 4), "rate")
        claims.append(FORK.judge(f"alpha: {WIDE} > {MCSD} (T = 1, {stop})", gain))
        lead = relative(costed(none, MU), costed(one, MU), "tokens", "cost")
        text = f"{WIDE} has at least 95 % of the speed without a decision model, modelled (T = 1, {stop}, mu = {MU:g})"
        claims.append(STOP.judge(text, lead, SPARES, least=-SHARE, shown=lead.percent()))
    heads = ("model", "tokens per step", "alpha", "draft forwards per step", "quality", f"speed at mu = {MU:g}")
    text = "The paper's whole method, D = 5 and W = 16: initial tokens of the target, a fork, a decision model, T = 1."
    return [text, table(heads, rows)]


def _parsed(name: str) -> tuple[int, list[int]]:
    """Initial tokens and the k-config below them."""
    width, _, shape = name.rpartition("+")
    return int(width or 1), [int(k) for k in shape.split("x")]


def _layers(shape: list[int]) -> list[int]:
    found, level = [], 1
    for k in shape:
        level *= k
        found.append(level)
    return found


def _fork(width: int) -> str:
    return f"{width}x1x1x1x1"


def _rated(record: Record, depth: int) -> Record:
    """With `rate`: per step, alpha."""
    return record | {"rate": [(t - s) / depth for t, s in zip(record["tokens"], record["steps"], strict=True)]}


def _alpha(record: Record, name: str) -> float:
    return (ratio(record).mean - 1) / len(_parsed(name)[1])


def _over(x: Estimate, amount: float) -> Estimate:
    return Estimate(*(value / amount for value in x))


def _signed(x: Estimate) -> str:
    return f"{x.mean:.3f} ± {x.resolution:.3f}"


SAMPLED = "sampled texts differ in how likely they are by as much"
LESS = "each doubling adds less, as every sequence is less likely than the ones before"
SPARES = "the model ends some growths that would have gone on, and spares draft forwards"
