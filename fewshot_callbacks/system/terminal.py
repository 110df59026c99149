"""Text from outside, such as class and file names, printed so that a terminal never obeys it as a control code."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# Characters that change the direction of writing. They affect more than the name: an override reverses the numbers after
# it.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e")


def printable(words: object) -> str:
    r"""Return a text with an escape for each character that controls a terminal, breaks a line or cannot be encoded.

    Examples:
        >>> printable("owl \x1b[2J"), printable("Ω ☃ ש")
        ('owl \\x1b[2J', 'Ω ☃ ש')
    """
    # Cc: control characters, such as escape. Cs: lone surrogates, which replace bytes of a file name that Python cannot
    # decode. Zl and Zp: line and paragraph separators.
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _REORDERING
        else character
        for character in str(words)
    )


def as_text(words: object) -> Text:
    """Return a text that rich prints unchanged. In a plain string, rich reads [x] as a style and [/] as an error."""
    from rich.text import Text  # noqa: PLC0415 - only printing needs it

    return Text(printable(words))


def print_notes(sentences: Iterable[str]) -> None:
    """Print notes on the input to the standard error, since the standard output may be JSON."""
    for sentence in sentences:
        print(f"note: {printable(sentence)}.", file=sys.stderr)


def note(words: object) -> Text:
    """Return a line that begins with the word `note`, in yellow."""
    from rich.text import Text  # noqa: PLC0415 - only printing needs it

    return Text.assemble(("note", "yellow"), " ", printable(words))
