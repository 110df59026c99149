"""Words that others chose, such as names of classes and files, on a terminal: shown as they are, obeyed never."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# Embeddings and overrides of direction, which reach beyond the name: an override turns the numbers after it round.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e")


def printable(words: object) -> str:
    r"""Write what would steer a terminal, or cannot be encoded, as its escape; line breaks too.

    Examples:
        >>> printable("owl \x1b[2J"), printable("Ω ☃ ש")
        ('owl \\x1b[2J', 'Ω ☃ ש')
    """
    # Cc are controls, among them the escape character; Cs lone surrogates, in which Python keeps bytes of a file name
    # that it cannot decode; Zl and Zp separate lines and paragraphs.
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _REORDERING
        else character
        for character in str(words)
    )


def as_text(words: object) -> Text:
    """Make what rich prints as it is; of a plain string it takes [x] for a style, and [/] for a mistake."""
    from rich.text import Text  # noqa: PLC0415 - only for those who print

    return Text(printable(words))


def print_notes(sentences: Iterable[str]) -> None:
    """Print sentences about the input to the standard error, where they are in no one's way who reads JSON."""
    for words in sentences:
        print(f"note: {printable(words)}.", file=sys.stderr)


def note(words: object) -> Text:
    """Make a line that begins with the word `note`, in yellow."""
    from rich.text import Text  # noqa: PLC0415 - only for those who print

    return Text.assemble(("note", "yellow"), " ", printable(words))
