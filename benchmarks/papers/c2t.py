"""C2T (Huo et al., arXiv 2502.13652)."""

import zlib
from pathlib import Path

from benchmarks.papers.jobs import Job, Results, cell
from benchmarks.papers.judging import judge, nodes_saved, ratio
from benchmarks.papers.scale import Scale
from benchmarks.papers.writing import Section, table

GATES = {
    "P+H+d": ["PHd", 48, "paper"],
    "P+H": ["PH", 48, "paper"],
    "P+d": ["Pd", 48, "paper"],
    "H+d": ["Hd", 48, "paper"],
    "log P+H+d": ["PHd", 48, "log"],
}
SEEDS = 3
HIDDEN = {hidden: f"h{hidden}" for hidden in (2, 12)}
HIDDEN_BETAS = (0.5, 0.8)
THEIRS_ABLATION = {
    "EAGLE-2": (3.89, 1.0),
    "P+H+d": (3.92, 0.7),
    "P+H": (3.92, 0.9),
    "P+d": (3.92, 0.9),
    "H+d": (0.98, 3.3),
}
THEIRS_HIDDEN = {2: 3.91, 6: 3.97, 12: 4.02, 24: 4.03, 36: 4.02, 48: 4.02}
WHOLE = "C2T, no second pruning"
MOST = 400
BUDGET = 150  # K = 15 times depth 10: the second pruning leaves no more


def gates(scale: Scale) -> Job:
    """Training of the ablation's classifiers."""
    gates = GATES | {name: ["PHd", hidden, "paper"] for hidden, name in HIDDEN.items()}
    if scale.quick:
        own = {"gates": {"P+H+d": GATES["P+H+d"]}, "prompts": 8, "tokens": 32, "nodes": 200, "seeds": 1}
    else:
        own = {"gates": gates, "prompts": 64, "tokens": 64, "nodes": 1010, "seeds": SEEDS}
    return Job("calibration:c2t_gates", own)


def jobs(scale: Scale) -> dict[str, Job]:
    found = {"gates": gates(scale)}

    def add(name: str, beta: float, gate: str | None, **tree: object) -> None:
        options = {"beta": beta, **({"gate": f"@{gate}.safetensors"} if gate else {}), **tree}
        trained = {"shipped": f"{zlib.crc32(found['gates'].key.encode()):08x}"} if gate else {}
        found[name] = cell("c2t", BUDGET, tree=options, **trained, **scale.greedy)

    for nodes in scale.some((10, 15, 20, 30, 45, 60, 90), (10, 30)):
        found[f"EAGLE-2 {nodes}"] = cell("eagle2", nodes, tree={"top_k": 15, "max_depth": 10}, **scale.greedy)
    for beta in scale.some((0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9), (0.5, 0.8)):
        add(f"C2T {beta}", beta, None)
    for beta in scale.some((0.5, 0.6, 0.7, 0.8, 0.9), (0.5, 0.8)):
        whole = {"beta": beta, "second_pruning": False}
        found[f"{WHOLE} {beta}"] = cell("c2t", MOST, tree=whole, **scale.greedy)
    for gate in scale.some(tuple(GATES), ("P+H+d",)):
        betas = (0.2, 0.5) if gate == "H+d" else (0.35, 0.5, 0.65, 0.8)
        for beta in scale.some(betas, (0.5, 0.8)):
            add(f"{gate} {beta}", beta, gate)
    for gate in scale.some(tuple(HIDDEN.values()), ()):
        for beta in HIDDEN_BETAS:
            add(f"{gate} {beta}", beta, gate)
    for length in scale.some((3, 5, 7, 9), (3, 5)):
        shape = {"shape": [1] * length, "children": "top_k"}
        found[f"chain {length}"] = cell("static_tree", length, tree=shape, **scale.greedy)
    for beta in scale.some((0.05, 0.1, 0.2, 0.35, 0.5, 0.7), (0.5,)):
        add(f"C2T chain {beta}", beta, None, mode="chain")
    return found


def section(r: Results, figures: Path) -> Section:
    claims = []

    def curve(prefix: str) -> dict[float, str]:
        found = [name for name in r if name.rsplit(" ", 1)[0] == prefix]
        return {
            float(name.rsplit(" ", 1)[1]): name
            for name in sorted(found, key=lambda name: float(name.rsplit(" ", 1)[1]))
        }

    def rows_of(prefix: str, what: str) -> list[tuple[object, ...]]:
        return [
            (f"{prefix}, {what} {value:g}", ratio(r[name]), ratio(r[name], "nodes").mean)
            for value, name in curve(prefix).items()
        ]

    heads = ("tree", "tokens per step", "nodes per step")
    parts = [
        "Greedy. EAGLE-2 with K = 15 and depth 10, C2T with the same limits and K survivors a level. The "
        "classifier (3-48-1) is the bundled one, which reads the logarithm of the path probability; those of the "
        "ablation are trained for it; all on EAGLE-2 trees (K = 10, 11 levels) over texts of the pair's training set, "
        f"until the held-out loss falls no more, the best of {SEEDS} seeds each. The paper's acceptance leaves out the "
        "bonus token, its node counts are totals of a benchmark.",
        table(heads, [*rows_of("EAGLE-2", "N ="), *rows_of("C2T", "beta ="), *rows_of(WHOLE, "beta =")]),
    ]
    eagle = [r[name] for name in curve("EAGLE-2").values()]
    full = [r[name] for name in curve("P+H+d").values()]
    wanted = [n for n in (15, 20, 30, 45, 60, 90) if n in curve("EAGLE-2")] or list(curve("EAGLE-2"))[-1:]
    for name in (WHOLE, "C2T"):
        ours = [r[one] for one in curve(name).values()]
        for nodes in wanted:
            saved = nodes_saved(ours, eagle, at=r[f"EAGLE-2 {nodes:g}"])
            text = f"{name}: EAGLE-2's acceptance (N = {nodes:g}) with at least 20 % fewer nodes"
            claims.append(judge(text, saved.less(0.2), REASONS[name], shown=saved.percent()))

    rows = []
    for name in ("EAGLE-2", *GATES):
        theirs = THEIRS_ABLATION.get(name)
        shown = None if theirs is None else f"{theirs[0]:.2f} with {theirs[1]:.1f}M nodes"
        own = [r[one] for one in curve(name).values()]
        if name == "EAGLE-2" or not own:
            rows.append((name, *[None] * (1 + len(wanted)), shown))
            continue
        saved = [nodes_saved(own, eagle, at=r[f"EAGLE-2 {nodes:g}"]).percent() for nodes in wanted]
        losses = ", ".join(f"{loss:.4f}" for loss in r["gates"][name]["losses"])
        rows.append((name, *saved, losses, shown))
        if name not in ("P+H+d", "log P+H+d"):
            gain = nodes_saved(full, own, at=r[f"EAGLE-2 {45 if 45 in wanted else wanted[-1]:g}"])
            claims.append(
                judge(f"all three features need fewer nodes than {name}", gain, REASONS[name], shown=gain.percent())
            )
    if any(curve(name) for name in GATES if name != "P+H+d"):
        parts.append(
            "Which features the classifier reads (P: path probability, H: entropy of the parent's law, d: depth): "
            "nodes saved at the acceptance of EAGLE-2 with N nodes, interpolated along sweeps of beta, and the "
            f"held-out loss of every seed (a constant's: {r['gates']['P+H+d']['constant']:.4f})."
        )
        heads_of = (*(f"nodes saved at N = {nodes:g}" for nodes in wanted), "held-out loss of each seed")
        parts.append(table(("features", *heads_of, "paper: LLaMA-2-7B, MT-Bench"), rows))
        for name in GATES:
            parts.append(table(heads, rows_of(name, "beta =")))
    hidden = [h for h in (*HIDDEN, 48) if f"h{h} {HIDDEN_BETAS[0]}" in r or h == 48]
    if len(hidden) > 1:
        rows = []
        for h in hidden:
            prefix = "P+H+d" if h == 48 else f"h{h}"
            records = [r[f"{prefix} {beta}"] for beta in HIDDEN_BETAS]
            rows.append((h, *(x for one in records for x in (ratio(one), ratio(one, "nodes").mean)), THEIRS_HIDDEN[h]))
        parts.append("Hidden units of the classifier:")
        parts.append(
            table(
                (
                    "h",
                    *(head for beta in HIDDEN_BETAS for head in (f"beta = {beta:g}", "nodes per step")),
                    "paper: tau at 0.5",
                ),
                rows,
            )
        )
        gain = nodes_saved(full, [r[f"h2 {beta}"] for beta in HIDDEN_BETAS], at=r[f"h2 {HIDDEN_BETAS[0]}"])
        text = f"48 hidden units need fewer nodes than 2 (at the acceptance of 2 with beta = {HIDDEN_BETAS[0]:g})"
        claims.append(judge(text, gain, REASONS["hidden"], shown=gain.percent()))
    parts.append(
        "Chain mode, with a chain of fixed length beside it (paper: EAGLE's chains of 5 to 9 tokens, tau 1.98 to "
        "2.13; C2T 2.12 at the nodes of a chain of 5.2):"
    )
    parts.append(table(heads, [*rows_of("chain", "length"), *rows_of("C2T chain", "beta =")]))
    chains, gated = ([r[name] for name in curve(prefix).values()] for prefix in ("chain", "C2T chain"))
    longest = max(curve("chain"))
    middle = 7 if 7 in curve("chain") else longest
    saved = nodes_saved(gated, chains, at=r[f"chain {middle:g}"])
    text = f"C2T's chains need fewer nodes than a fixed chain of {middle:g} at its acceptance"
    claims.append(judge(text, saved, REASONS["chain"], shown=saved.percent()))
    return Section("C2T (arXiv 2502.13652)", parts, claims)


SAVES = (
    "it does save nodes, more of them in larger trees, and the paper's have 100 to 300: a gate with either form of P, "
    "trained until its held-out loss falls no more, saves alike, so what is missing is not training"
)
REASONS = {
    "C2T": SAVES,
    WHOLE: SAVES + ". Without the second pruning unsure levels grow wide, and the same acceptance takes more nodes",
    "P+H": "held-out losses are nearly equal, and so are the savings",
    "P+d": "held-out losses are nearly equal, and so are the savings",
    "H+d": "",
    "chain": "",
    "hidden": "",
}
