"""`ReportSettings`: the size and content of a report, with checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import parse_colour
from fewshot_callbacks.settings import ReportDefaults, with_meanings


@partial(with_meanings, settings=ReportDefaults)
@dataclass(frozen=True)
class ReportSettings(ReportDefaults):
    """Size and content of a report; numbers of items and pairs are upper bounds.

    Args:
        **settings: The settings, by name.

    Raises:
        ValueError: A number is out of range, or `background` is not a colour.

    Examples:
        >>> ReportSettings(worst=12).worst
        12
    """

    def __post_init__(self) -> None:
        parse_colour(self.background)
        for setting in fields(self):
            value = getattr(self, setting.name)
            smallest = 1 if setting.name in ("neighbours", "thumbnail", "confusion_queries") else 0
            is_number = setting.name != "background" and value is not None
            if is_number and not value >= smallest:  # also true for NaN
                raise InputError(f"{setting.name} is {value}. Use at least {smallest}.")
