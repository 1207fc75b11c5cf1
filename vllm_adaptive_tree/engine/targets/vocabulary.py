"""Comparison of a draft's tokens with the target's: with another tokenizer, even of equal size, it drafts noise."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.engine.checkpoint import local_folder

logger = logging.getLogger(f"vllm.{__name__}")

FILE = "tokenizer.json"
SHOWN = 3
FEW = 0.01
"""Share of the tokens in which tokenizers of one family may differ."""


class Comparison(NamedTuple):
    """Tokens of a draft and of its target, by id."""

    mine: dict[int, str]
    theirs: dict[int, str]

    @property
    def common(self) -> int:
        """Number of ids that both have."""
        return len(self.mine.keys() & self.theirs.keys())

    @property
    def differing(self) -> list[int]:
        """Common ids with different tokens."""
        return sorted(
            number for number in self.mine.keys() & self.theirs.keys() if self.mine[number] != self.theirs[number]
        )

    @property
    def another(self) -> bool:
        """True if the tokenizers are not of one family."""
        return len(self.differing) > FEW * self.common


def compare(draft: str, revision: str | None, target: str, of_target: str | None) -> Comparison | None:
    """Read the tokenizers of a draft and of its target: folders or hub names, with their revisions. Special tokens are
    left out, which have names of their own in models of one family. None: one has no such `tokenizer.json` here."""
    mine, theirs = _file(draft, revision), _file(target, of_target)
    if mine is None or theirs is None:
        return None
    both = Comparison(_tokens(mine), _tokens(theirs))
    return both if both.common else None


def warn_of_another(draft: str, revision: str | None, target: str, of_target: str | None) -> None:
    """Warn, with examples, if the same ids are other tokens for `draft` than for the tokenizer `target`."""
    both = compare(draft, revision, target, of_target)
    if both is not None and both.another:
        differing = both.differing
        shown = ", ".join(
            f"{number} is {both.mine[number]!r} and {both.theirs[number]!r}" for number in differing[:SHOWN]
        )
        logger.warning(
            "speculative_config['model']: the tokenizer of %r is another than that of %r, though as large: of %d "
            "tokens %d differ, %s; hardly a token will be accepted, use a draft of the target's tokenizer",
            draft,
            target,
            both.common,
            len(differing),
            shown,
        )


def _file(model: str, revision: str | None) -> str | None:
    folder = local_folder(model, revision)
    file = None if folder is None else Path(folder) / FILE
    return file.read_text(encoding="utf-8") if file is not None and file.is_file() else None


def _tokens(text: str) -> dict[int, str]:
    """Id -> token, without special ones; empty if the file does not list them."""
    try:
        written: dict[str, Any] = json.loads(text)
        listed = written["model"]["vocab"]
        pairs = listed.items() if isinstance(listed, dict) else ((entry[0], at) for at, entry in enumerate(listed))
        tokens = {number: token for token, number in pairs}
        for added in written.get("added_tokens") or ():
            tokens[added["id"]] = added["content"]
            if added.get("special"):
                del tokens[added["id"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):  # the tokenizer itself reports it
        return {}
    return tokens
