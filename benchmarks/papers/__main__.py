"""The figures of the papers on the bundled pair: ours beside theirs, every line judged; the headlines on SmolLM2.

    python -m benchmarks.papers            # measures what is missing, then writes docs/papers.md and the tables
    python -m benchmarks.papers --quick    # a few cells, in a minute or two
    python -m benchmarks.papers --render   # writes the pages from the results that are there
    python -m benchmarks.papers --model smollm2 --draft DRAFT --humaneval HumanEval.jsonl.gz --chat held_out.json

It measures acceptance, not speed. Results are saved as they come; a run goes on where the last one ended.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.papers import (
    blocks,
    c2t,
    c2t_gates,
    c2t_sharp,
    dyspec,
    engine,
    expectation,
    hub_drafts,
    mcsd,
    opt_tree,
    smollm2,
    spechub,
    summary,
)
from benchmarks.papers.jobs import Store, in_turn, run_all, workers
from benchmarks.papers.models import Subject
from benchmarks.papers.scale import FULL, QUICK, SMOLLM2, Scale

SECTIONS: dict[str, Any] = {
    "opt_tree": opt_tree,
    "expectation": expectation,
    "dyspec": dyspec,
    "blocks": blocks,
    "c2t": c2t,
    "c2t_gates": c2t_gates,
    "c2t_sharp": c2t_sharp,
    "mcsd": mcsd,
    "spechub": spechub,
    "hub_drafts": hub_drafts,
    "engine": engine,
}
LEARNING = (c2t, c2t_gates, c2t_sharp, spechub, smollm2)
"""Sections whose cells read files that jobs of their own make: `learnt`, `write_learnt`."""
ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts and cells, for tests")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--only", choices=tuple(SECTIONS), nargs="+", default=list(SECTIONS), help="what to measure")
    parser.add_argument("--model", choices=("smollm2",), help="measure the headlines on it, not the bundled pair")
    parser.add_argument("--draft", type=Path, help="folder of its draft: `train-head --kind layers`")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--chat", type=Path, help="held_out.json of examples/chat_texts.py")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder of results, tables.md and figures/; default: benchmarks/results/papers, with --quick build/papers",
    )
    parser.add_argument("--docs", type=Path, help="folder of papers.md; default: docs, with --quick build/papers")
    options = parser.parse_args(arguments)
    files = (options.draft, options.humaneval, options.chat)
    if options.model and None in files:
        parser.error("--model smollm2 needs --draft, --humaneval and --chat")
    scale = QUICK if options.quick else FULL
    aside = ROOT / "build" / "papers"
    results = options.results or (aside if options.quick else ROOT / "benchmarks" / "results" / "papers")
    docs = options.docs or (aside if options.quick else ROOT / "docs")
    store, real = Store(results / "measured.json"), Store(results / "smollm2.json")
    if options.model:
        from vllm_adaptive_tree.files import cache_folder
        from vllm_adaptive_tree.models.fetch import fetch

        size = QUICK if options.quick else SMOLLM2
        model = fetch("smollm2", cache_folder() / "models", say=print).folder
        measure(size, real, [smollm2], options.workers, smollm2.subject(model, *files, size))
    elif not options.render:
        measure(scale, store, [SECTIONS[name] for name in options.only], options.workers, Subject())
    write(scale, store, real, results, docs)


def measure(scale: Scale, store: Store, modules: list[Any], processes: int, subject: Subject) -> None:
    with TemporaryDirectory() as name, workers(processes, subject) as pool:
        folder = Path(name)
        for module in (module for module in modules if module in LEARNING):
            needed = module.learnt(scale)
            run_all(pool, list(needed.values()), store, folder, title="what methods learn")
            module.write_learnt(store.of(needed), folder)
        works = [work for module in modules for work in module.jobs(scale).values()]
        run_all(pool, in_turn(works), store, folder, title="cells")


def write(scale: Scale, store: Store, real: Store, results: Path, docs: Path) -> None:
    """The sections whose cells are all there."""
    sections = {}
    for name, module in SECTIONS.items():
        works = module.jobs(scale)
        if all(store.has(work) for work in works.values()):
            sections[name] = module.section(store.of(works), results / "figures")
    verdicts: dict[str, Any] = {
        name: [claim._asdict() for claim in section.claims] for name, section in sections.items()
    }
    verdicts["provenance"] = store.found.get("provenance")
    (results / "verdicts.json").write_text(json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n")
    page, size = summary.page(list(sections.values()), scale), QUICK if scale.quick else SMOLLM2
    works = smollm2.jobs(size)
    if all(real.has(work) for work in works.values()):
        claims = [claim for section in sections.values() for claim in section.claims]
        page += "\n" + smollm2.section(real.of(works), claims, size) + "\n"
    (docs / "papers.md").write_text(page)
    (results / "tables.md").write_text(summary.tables(list(sections.values())))


if __name__ == "__main__":
    main()
