"""Notes of reports, and warnings for callers who see the values but not the report."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from logging import Logger
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.functional._repeated import is_on_copies


class ReportFields(NamedTuple):
    """Fields of a report, by name, and notes on the fields that are NaN."""

    fields: dict[str, Any]
    notes: list[str]


class NotesOnce:
    """Warns of each kind of note once. Notes that only differ in numbers are one kind."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.shown: set[str] = set()

    def tell(self, notes: Iterable[str], logger: Logger | None = None) -> None:
        """Warn of the notes whose kind is new.

        Without a logger, notes become warnings. A note on copies is always a warning, because the values are then too
        high.
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
    """Return a text without digits and endings, so that messages that only differ in numbers become equal.

    Examples:
        >>> without_digits("1 of 3 rows holds NaN.") == without_digits("2 of 3 rows hold NaN.")
        True
        >>> without_digits("1 query is left out.") == without_digits("12 queries are left out.")
        True
    """
    letters = "".join(character for character in text if not character.isdigit())
    verbless = re.sub(r"\b(is|are|has|have)\b", "", letters)
    return re.sub(r"[iesy]+\b", "", verbless)


# Classes are uneven if the largest class has at least this many times the average number of items.
UNEVEN = 1.5


def notes_on_largest_class(accuracies: Mapping[str, float], classes: Int[Tensor, "items"]) -> list[str]:
    """Return a note if classes are uneven and an accuracy does not exceed the share of the largest class.

    Always predicting this class has an accuracy of its share. For even classes no note is needed, because a low accuracy is
    obvious.

    `accuracies` is the share of correctly predicted items, by metric. There is no note for a single class.
    """
    counts = classes.unique(return_counts=True)[1]
    if len(counts) < 2:
        return []
    share = int(counts.max()) / len(classes)
    if share < UNEVEN / len(counts):
        return []
    low = [f"{key} ({value:.3f})" for key, value in accuracies.items() if value <= share]
    if not low:
        return []
    verb = "is" if len(low) == 1 else "are"
    return [
        f"{', '.join(low)} {verb} not above {share:.3f}, the share of the largest query class, so always predicting "
        "this class would be as accurate. Read the mean over the classes, from report.per_query."
    ]
