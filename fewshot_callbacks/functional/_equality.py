"""Equality of results that may hold NaN: equal to a copy of themselves in every version of Python."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, TypeVar

Result = TypeVar("Result")

# What NaN is compared as: NaN is unequal to everything, also to itself.
_NAN = object()


def equal_with_nan(result: type[Result]) -> type[Result]:
    """Return a dataclass, two of which are equal if their fields are, where NaN equals NaN. Decorates a frozen dataclass.

    Without it, a result with NaN is never equal to a copy that another process has sent. From Python 3.13 on it is not even
    equal to itself, since a dataclass then compares each field by `==`; before, one and the same object was equal.

    Examples:
        >>> from dataclasses import dataclass
        >>> @equal_with_nan
        ... @dataclass(frozen=True)
        ... class Recall:
        ...     value: float
        ...     interval: tuple[float, float]
        >>> Recall(1.0, (float("nan"), float("nan"))) == Recall(1.0, (float("nan"), float("nan")))
        True
    """
    # `dataclass` has just made a method of this name. A base class would need `eq=False` at each dataclass, and one that
    # forgets it would compare NaN silently.
    result.__eq__ = _equals  # type: ignore[method-assign]
    result.__hash__ = _hash_of  # type: ignore[method-assign]
    return result


def _equals(self: Any, other: Any) -> Any:
    """Return whether two results are equal; `NotImplemented`, as Python asks for, if the other one is none of this class."""
    if type(other) is not type(self):
        return NotImplemented
    return _comparable_fields(self) == _comparable_fields(other)


def _hash_of(self: Any) -> int:
    return hash(_comparable_fields(self))


def _comparable_fields(result: Any) -> tuple[Any, ...]:
    """Return the values of the fields that a dataclass compares, with NaN as a value that equals itself."""
    return tuple(_comparable(getattr(result, field.name)) for field in fields(result) if field.compare)


def _comparable(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return _NAN
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return {name: _comparable(entry) for name, entry in value.items()}
    return value
