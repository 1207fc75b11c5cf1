"""Python files of one vLLM release, in a folder or an archive, parsed one by one on demand."""

import ast
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

ROOT = "vllm"
INIT = f"{ROOT}/__init__.py"


class Sources:
    def __init__(self, names: Iterable[str], read: Callable[[str], bytes]):
        """`names`: files with "/" between folders; `read` gives the content of one.

        Raises:
            ValueError: there is no vllm/__init__.py among them.
        """
        names = [name for name in names if name.endswith(".py")]
        starts = [name.removesuffix(INIT) for name in names if f"/{name}".endswith(f"/{INIT}")]
        if not starts:
            raise ValueError(f"there is no {INIT} in it")
        start = min(starts, key=len)
        self._read = read
        self._files = {_dotted(name[len(start) :]): name for name in names if name.startswith(f"{start}{ROOT}/")}
        self._trees: dict[str, ast.Module] = {}

    @classmethod
    def open(cls, path: Path) -> "Sources":
        """Sources in `path`: a folder that holds vllm/ (or is it), a wheel, or a source archive.

        Raises:
            ValueError: it is none of these.
            OSError: it cannot be read.
        """
        try:
            if path.is_dir():
                base = path.parent if path.name == ROOT and not (path / INIT).exists() else path
                names = (file.relative_to(base).as_posix() for file in (base / ROOT).rglob("*.py"))
                return cls(names, lambda name: (base / name).read_bytes())
            if zipfile.is_zipfile(path):
                archive = zipfile.ZipFile(path)
                return cls(archive.namelist(), archive.read)
            if tarfile.is_tarfile(path):
                contents = _python_files(path)
                return cls(contents, contents.__getitem__)
        except ValueError as error:
            raise ValueError(f"{path} does not hold the sources of vLLM: {error}") from error
        raise ValueError(f"{path} is neither a folder nor a wheel nor a source archive of vLLM")

    @classmethod
    def installed(cls) -> "Sources":
        """Sources of the installed vLLM. Raises ValueError where it is not installed."""
        spec = find_spec(ROOT)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError("vLLM is not installed here; the release is compared with the installed one")
        return cls.open(Path(next(iter(spec.submodule_search_locations))))

    def __contains__(self, module: str) -> bool:
        return module in self._files

    @property
    def modules(self) -> list[str]:
        return sorted(self._files)

    def is_package(self, module: str) -> bool:
        return self._files[module].endswith("/__init__.py")

    def text(self, module: str) -> str:
        return self._read(self._files[module]).decode()

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self._read(self._files[module]), self._files[module])
        return self._trees[module]

    def defining(self, name: str, *, member: bool = False) -> list[str]:
        """Modules that define a class, function or variable `name`; with `member` methods `module.Class` instead."""
        what = re.escape(name).encode()
        if member:
            pattern = re.compile(rb"^class (\w+)|^    (?:async )?def " + what + rb"\(", re.MULTILINE)
        else:
            pattern = re.compile(rb"^(?:class|def|async def) " + what + rb"\b|^" + what + rb" *[:=]", re.MULTILINE)
        found = []
        for module in self.modules:
            text = self._read(self._files[module])
            if what not in text:
                continue
            inside = ""
            for match in pattern.finditer(text):
                if not member:
                    found.append(module)
                    break
                if match[1]:
                    inside = match[1].decode()
                elif inside:
                    found.append(f"{module}.{inside}")
        return found


def _dotted(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _python_files(archive: Path) -> dict[str, bytes]:
    """Contents of the Python files, read in one pass: a compressed archive cannot be read in another order."""
    contents = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(".py") and f"/{ROOT}/" in member.name:
                file = tar.extractfile(member)
                assert file is not None
                contents[member.name] = file.read()
    return contents
