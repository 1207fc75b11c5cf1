"""Coloured text that marks drafted tokens, from the tokens that arrived together."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.text import Text

Decode = Callable[[list[int]], str]

DRAFTED, OWN = "green", "magenta"


class Span(NamedTuple):
    text: str
    drafted: bool


def pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Texts that the tokens add; their concatenation is `decode(tokens)`. A character of several tokens belongs to
    the last of them, the others get an empty string."""
    whole, shown, texts = decode(list(tokens)), 0, []
    for end in range(1, len(tokens) + 1):
        text = whole if end == len(tokens) else decode(list(tokens[:end]))
        open_character = text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens)
        upto = shown if open_character or not whole.startswith(text) else len(text)
        texts.append(whole[shown:upto])
        shown = upto
    return texts


def spans(steps: Sequence[Sequence[int]], decode: Decode) -> list[Span]:
    """Spans of the steps' text, cut where the origin changes. Of the tokens of one step, the last is the target's
    own and those before it were drafted and accepted."""
    drafted = [place < len(step) - 1 for step in steps for place in range(len(step))]
    marked = zip(drafted, pieces([token for step in steps for token in step], decode), strict=True)
    return [Span("".join(text for _, text in group), origin) for origin, group in groupby(marked, key=lambda x: x[0])]


def coloured(spans: Sequence[Span]) -> Text:
    return Text.assemble(*((span.text, DRAFTED if span.drafted else OWN) for span in spans), end="")


def legend(*, colours: bool) -> Text:
    if not colours:
        return Text("Drafted tokens are not marked: the output is no terminal, or NO_COLOR is set.")
    return Text.assemble(
        ("drafted and accepted", DRAFTED),
        " | ",
        ("the target's own tokens, one per step", OWN),
        " | ",
        ("prompt", "dim"),
    )
