"""One recorded tree, drawn in a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from vllm_adaptive_tree.report.tokens import DRAFTED, OWN

REJECTED = "dim"


def drawn(step: Mapping[str, Any], texts: Mapping[str, str]) -> Tree:
    """Tree of a `step` of `viewer.read`: accepted nodes, the token that the target added, and rejected nodes with
    their siblings in the order of the draft. `texts`: token -> text."""
    accepted = set(step["accepted"])
    branches = [Tree(Text("the last token", "dim"), guide_style="dim")]
    nodes = list(zip(step["tokens"], step["parents"], step["values"], strict=True))[: step["verified"]]
    for node, (token, parent, value) in enumerate(nodes):
        colour = DRAFTED if node in accepted else REJECTED
        label = Text.assemble((quoted(texts[str(token)]), colour), (f" {value:.2f}", "dim"))
        branches.append(branches[parent + 1].add(label))
    last = step["accepted"][-1] + 1 if accepted else 0
    branches[last].add(Text(quoted(texts[str(step["emitted"][-1])]), OWN))
    return branches[0]


def quoted(text: str) -> str:
    return repr(text)[1:-1].replace(" ", "\N{OPEN BOX}")
