"""Notes of reports: beside the fields that they explain, and for callers who see the values and never the report."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from logging import Logger
from typing import Any, NamedTuple

from fewshot_callbacks.functional._repeated import is_on_copies


class ReportFields(NamedTuple):
    """Some fields of a report, by name, and notes on those that are NaN."""

    fields: dict[str, Any]
    notes: list[str]


class NotesOnce:
    """Tells each kind of note once. Notes that differ only in numbers are of one kind.

    Args:
        owner: The class that the user made, for messages.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.shown: set[str] = set()

    def tell(self, notes: Iterable[str], logger: Logger | None = None) -> None:
        """Tell the notes whose kind was not shown before.

        Args:
            notes: Those of a report.
            logger: That of a library whose users look for its words there; None warns. A note on copies is a warning in any
                case, since values are too high then.
        """
        for note in notes:
            kind = without_digits(note)
            if kind in self.shown:
                continue
            self.shown.add(kind)
            message = f"{self.owner}: {note} (Shown once.)"
            if logger is None or is_on_copies(note):
                warnings.warn(message, stacklevel=3)
            else:
                logger.warning(message)


def without_digits(text: str) -> str:
    """Return a text without its digits and endings, so that messages that differ only in numbers are of one kind.

    Examples:
        >>> without_digits("1 of 3 rows holds NaN.") == without_digits("2 of 3 rows hold NaN.")
        True
        >>> without_digits("1 query is left out.") == without_digits("12 queries are left out.")
        True
    """
    letters = "".join(character for character in text if not character.isdigit())
    verbless = re.sub(r"\b(is|are|has|have)\b", "", letters)
    return re.sub(r"[iesy]+\b", "", verbless)
