"""The figures of the papers on the bundled pair: ours beside theirs, every line judged.

    python -m benchmarks.papers            # measures what is missing, then writes docs/papers.md
    python -m benchmarks.papers --quick    # a few cells, in a minute or two
    python -m benchmarks.papers --render   # writes the docs from the results that are there

It measures acceptance, not speed. Results are saved as they come; a run goes on where the last one ended.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.papers import c2t, dyspec, engine, mcsd, opt_tree, spechub
from benchmarks.papers.calibration import write_gates
from benchmarks.papers.jobs import Store, run_all, workers
from benchmarks.papers.scale import FULL, QUICK, Scale
from benchmarks.papers.writing import page

PAPERS = {"opt_tree": opt_tree, "dyspec": dyspec, "c2t": c2t, "mcsd": mcsd, "spechub": spechub, "engine": engine}
ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts and cells, for tests")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--only", choices=tuple(PAPERS), nargs="+", default=list(PAPERS), help="papers to measure")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/papers, with --quick build/papers")
    parser.add_argument(
        "--docs", type=Path, help="folder of papers.md and figures/; default: docs, with --quick build/papers"
    )
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else FULL
    aside = ROOT / "build" / "papers"
    results = options.results or (aside if options.quick else ROOT / "benchmarks" / "results" / "papers")
    docs = options.docs or (aside if options.quick else ROOT / "docs")
    store = Store(results / "measured.json")
    if not options.render:
        measure(scale, store, options.only, options.workers)
    write(scale, store, results, docs)


def measure(scale: Scale, store: Store, papers: list[str], processes: int) -> None:
    modules = [PAPERS[name] for name in papers]
    with TemporaryDirectory() as name, workers(processes) as pool:
        folder = Path(name)
        if "c2t" in papers:
            run_all(pool, [c2t.gates(scale)], store, folder, title="gates")
            write_gates(store.found[c2t.gates(scale).key], folder)
        run_all(pool, [job for module in modules for job in module.jobs(scale).values()], store, folder, title="cells")


def write(scale: Scale, store: Store, results: Path, docs: Path) -> None:
    sections = {
        name: module.section(found, docs / "figures")
        for name, module in PAPERS.items()
        if len(found := store.of(module.jobs(scale))) == len(module.jobs(scale))
    }
    verdicts = {name: [claim._asdict() for claim in section.claims] for name, section in sections.items()}
    (results / "verdicts.json").write_text(json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n")
    (docs / "papers.md").write_text(page(list(sections.values()), scale))


if __name__ == "__main__":
    main()
