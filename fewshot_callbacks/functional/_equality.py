"""Equality of results that may contain NaN, the same in every Python version."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, TypeVar

Result = TypeVar("Result")

# Stands for NaN in comparisons, because NaN is not equal to itself.
_NAN = object()


def equal_with_nan(result: type[Result]) -> type[Result]:
    """Return a frozen dataclass whose instances are equal if their fields are, with NaN equal to NaN. A decorator.

    Without it, a result with NaN never equals a copy that another process sent. From Python 3.13 on, it does not even equal
    itself, because dataclasses then compare each field by `==`.

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
    # Replaces the method from `dataclass`. A base class would need `eq=False` at each dataclass, and a dataclass without it
    # would silently compare NaN as unequal.
    result.__eq__ = _equals  # type: ignore[method-assign]
    result.__hash__ = _hash_of  # type: ignore[method-assign]
    return result


def _equals(self: Any, other: Any) -> Any:
    """Return whether two results are equal; `NotImplemented` if they have different classes."""
    if type(other) is not type(self):
        return NotImplemented
    return _comparable_fields(self) == _comparable_fields(other)


def _hash_of(self: Any) -> int:
    return hash(_comparable_fields(self))


def _comparable_fields(result: Any) -> tuple[Any, ...]:
    """Return the compared fields, with a NaN that equals itself."""
    return tuple(_comparable(getattr(result, field.name)) for field in fields(result) if field.compare)


def _comparable(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return _NAN
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return {name: _comparable(entry) for name, entry in value.items()}
    return value
