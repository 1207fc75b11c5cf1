"""Hooks of the site (`mkdocs.yml`): files outside docs/ that pages link to become part of it.

Markdown becomes a page and any other file a download, under its path in the repository. A link to a folder goes to its
README.md. So the site is complete, pages read the same in the repository, and a broken link fails the build.
"""

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what is pure here is tested without it
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d.,]*%? (?:± [\d.]+|\[[^\]|]*\](?: \(\d+\))?)")
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "patches/README.md", "examples/70b/README.md")


def on_files(files: "Files", config: Any) -> "Files":
    """Add all linked files, and the files that these link to."""
    from mkdocs.structure.files import File

    pending = [*ALWAYS, "examples/papers/README.md"]
    for file in files.documentation_pages():
        pending += outside(file.src_uri, file.content_string, inside=True)
    while pending:
        path = pending.pop()
        if files.get_file_from_path(path) is not None:
            continue
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            pending += outside(path, (ROOT / path).read_text(), inside=False)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: "Files") -> str:
    """Rewrite links to their place in the site."""
    inside = (ROOT / "docs" / page.file.src_uri).is_file()

    def rewritten(link: re.Match[str]) -> str:
        found = target(page.file.src_uri, link[1], inside=inside)
        if found is None:
            return link[0]
        return relpath(found, str(PurePosixPath(page.file.src_uri).parent)) + (link[2] or "")

    return _beside_fences(markdown, lambda text: whole_numbers(LINK.sub(rewritten, text)))


def whole_numbers(text: str) -> str:
    """Text whose numbers in tables keep to one line with their intervals and errors."""
    lines = (
        NUMBER.sub(lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )
    return "\n".join(lines)


def outside(page: str, markdown: str, *, inside: bool) -> list[str]:
    """Paths in the repository, outside docs/, that a page links to. `inside`: True if the page is in docs/."""
    links: list[str] = []

    def collected(text: str) -> str:
        links.extend(link[1] for link in LINK.finditer(text))
        return text

    _beside_fences(markdown, collected)
    found = [target(page, link, inside=inside) for link in links]
    return [path for path in found if path is not None and not (ROOT / "docs" / path).is_file()]


def target(page: str, link: str, *, inside: bool) -> str | None:
    """Path in the site of a page's relative link: below docs/ for files there, else the path in the repository; None if
    nothing is there."""
    folder = PurePosixPath("docs" if inside else ".") / PurePosixPath(page).parent
    path = normpath(str(folder / link))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    if path == "README.md":  # its place in the site is the front page
        return "index.md"
    return path.removeprefix("docs/") if (ROOT / path).is_file() else None


def _beside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to all text outside fenced blocks."""
    found, end = [], 0
    for fence in FENCE.finditer(markdown):
        found += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*found, change(markdown[end:])])
