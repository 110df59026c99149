"""Notes of reports: beside the fields that they explain, and for callers who see the values and never the report."""

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


# Classes are uneven if the largest one has at least this many times the items that it would have of even classes.
UNEVEN = 1.5


def notes_on_largest_class(accuracies: Mapping[str, float], classes: Int[Tensor, "items"]) -> list[str]:
    """Return a note if classes are uneven, and an accuracy is not above the share of the largest class.

    Always naming that class reaches its share. Of even classes the share is that of chance, which a low accuracy shows by
    itself.

    Args:
        accuracies: Metric -> share of the items whose class was named.
        classes: The class of each item; of one class alone there is no note.
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
        f"{', '.join(low)} {verb} not above {share:.3f}, the share of the largest class of the queries: to name that class "
        "always would do as well. Read the mean of the classes, from report.per_query."
    ]
