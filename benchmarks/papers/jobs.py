"""Jobs to compute: functions of this package and their arguments, run by several processes."""

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tqdm import tqdm

from benchmarks.papers.bootstrap import merged
from benchmarks.papers.decoding import Cell
from benchmarks.papers.models import Subject, use
from vllm_adaptive_tree.bench.provenance import provenance

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    function: str
    """ "module:name" in this package; called with the folder of the run's files and `arguments`, it returns JSON."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.function} {json.dumps(self.arguments, sort_keys=True)}"

    def run(self, folder: Path) -> Any:
        module, _, name = self.function.partition(":")
        return getattr(import_module(f"benchmarks.papers.{module}"), name)(folder, **self.arguments)


Work = Job | tuple[Job, ...]
"""A job, or the same cell with several sets of random numbers."""


def draws(count: int, method: str, nodes: int, temperature: float, **rest: Any) -> tuple[Job, ...]:
    """The same cell `count` times; its records are merged."""
    return tuple(cell(method, nodes, temperature, draw=draw, **rest) for draw in range(count))


def in_turn(works: Iterable[Work]) -> list[Job]:
    """All jobs, the first draw of every cell before any second one."""
    rows = [work if isinstance(work, tuple) else (work,) for work in works]
    return [row[draw] for draw in range(max(map(len, rows))) for row in rows if draw < len(row)]


def cell(method: str, nodes: int, temperature: float = 0.0, **rest: Any) -> Job:
    """The job of `decoding.Cell`."""
    one = Cell(method, nodes, temperature, **rest)
    if file := one.options(Path()).tree.shipped():
        one = replace(one, shipped=_checksum(file))
    return Job("jobs:measured", asdict(one))


def _checksum(file: Path) -> str:
    """Of a vector or a gate; not of what else stands in the file."""
    if file.suffix == ".json":
        content = json.dumps(json.loads(file.read_text())["vector"]).encode()
    else:
        content = b"".join(weight.numpy().tobytes() for _, weight in sorted(load_file(file).items()))
    return f"{zlib.crc32(content):08x}"


def measured(folder: Path, **arguments: Any) -> Any:
    from benchmarks.papers.decoding import measure

    return measure(Cell(**arguments), folder)


class Store:
    """Results by the key of their job, one per line, each saved as it comes."""

    def __init__(self, file: Path):
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.made = provenance()
        self.made |= _earlier(self.found.get("provenance", self.made), self.made["commit"])

    def save(self, job: Job, result: Any) -> None:
        self.found |= {job.key: result, "provenance": self.made}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self.found.items()))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".unfinished")
        beside.write_text("{\n" + lines + "\n}\n")
        beside.replace(self.file)

    def of(self, works: Mapping[str, Work]) -> dict[str, Any]:
        """Results by the names of their jobs, those of several draws merged; jobs without one are left out."""
        return {name: self._result(work) for name, work in works.items() if self.has(work)}

    def has(self, work: Work) -> bool:
        return all(job.key in self.found for job in in_turn([work]))

    def _result(self, work: Work) -> Any:
        return merged([self.found[job.key] for job in work]) if isinstance(work, tuple) else self.found[work.key]


def _earlier(made: Mapping[str, Any], commit: str) -> dict[str, str]:
    """A note on the results that were there, if another commit made them."""
    if made["commit"] == commit:
        return {"note": made["note"]} if "note" in made else {}
    more = f" ({made['note']})" if "note" in made else ""
    return {"note": f"cells of earlier runs: commit {made['commit']}{more}"}


def workers(count: int, subject: Subject) -> Executor:
    """Processes of one thread each; one worker is a thread of this process, with as many threads as that has."""
    if count == 1:
        use(subject)
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(subject,))


def run_all(pool: Executor, jobs: list[Job], store: Store, folder: Path, *, title: str) -> None:
    """Run those without a result; each is saved as it ends, and an error is raised behind the last one."""
    missing = {job.key: job for job in jobs if job.key not in store.found}
    futures = {pool.submit(job.run, folder): job for job in missing.values()}
    errors = []
    for future in tqdm(as_completed(futures), total=len(futures), desc=title, smoothing=0, disable=not futures):
        if error := future.exception():
            errors.append(error)
        else:
            store.save(futures[future], future.result())
    if errors:
        raise errors[0]


def _begin(subject: Subject) -> None:
    import torch

    torch.set_num_threads(1)
    use(subject)
