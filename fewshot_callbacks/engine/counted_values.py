"""Ascending values that stand for pairs, and how many pairs reach a score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.counting import FloatArray
from fewshot_callbacks.engine.relevance import Ints

# A binary search takes about as long as reading this many values in order.
SEARCH_PRICE = 32


class CountedValues(NamedTuple):
    """Ascending values, such as the scores of pairs, and how many pairs each of them stands for.

    A value stands for `weight * copies` pairs.

    Examples:
        >>> values = CountedValues.of(np.array([0.5, 0.1]), np.array([1, 3]))
        >>> values.count_reaching(np.array([0.0, 0.2])).tolist(), values.total
        ([4, 1], 4)
    """

    values: FloatArray  # (values,) ascending
    # (values + 1,) sums of the copies of each value and all higher ones, and 0; None if each value has one copy
    sums: Ints | None = None
    # number of pairs that a copy stands for
    weight: int = 1

    @classmethod
    def of(cls, values: NDArray[Any], copies: Ints | None = None, weight: int = 1) -> CountedValues:
        """Return values that may be given in any order.

        Args:
            values: (values,).
            copies: (values,) number of copies of each value; None for one copy each.
            weight: Number of pairs that a copy stands for.
        """
        if copies is None:
            ascending: NDArray[Any] = np.sort(values)
            return cls(ascending, None, weight)
        order = np.argsort(values)
        return cls(values[order], _sums(copies[order]), weight)

    @classmethod
    def joined(cls, pieces: Sequence[CountedValues]) -> CountedValues:
        """Return the values of all pieces. All have the same weight, and either all have copies or none has."""
        if not pieces:
            return NO_VALUES
        values = np.concatenate([piece.values for piece in pieces])
        copies = [piece.copies for piece in pieces if piece.copies is not None]
        return cls.of(values, np.concatenate(copies) if copies else None, pieces[0].weight)

    @property
    def copies(self) -> Ints | None:
        """(values,) Number of copies of each value; None for one copy each."""
        return None if self.sums is None else self.sums[:-1] - self.sums[1:]

    @property
    def total_copies(self) -> int:
        """Number of copies of all values."""
        return len(self.values) if self.sums is None else int(self.sums[0])

    @property
    def total(self) -> int:
        """Number of pairs that all values stand for."""
        return self.weight * self.total_copies

    def count_reaching(self, scores: NDArray[np.float64]) -> Ints:
        """Return how many pairs reach each of the ascending scores."""
        if self.sums is None:
            return self.weight * number_reaching(self.values, scores)
        return self.weight * self.sums[first_reaching(self.values, scores)]

    def every(self, step: int) -> FloatArray:
        """Return every `step`-th copy, ascending, starting with the lowest."""
        if self.sums is None:
            return self.values[::step].copy()
        copies_up_to = self.total_copies - self.sums[1:]
        return self.values[np.searchsorted(copies_up_to, np.arange(0, self.total_copies, step), side="right")]

    def where(self, mask: NDArray[np.bool_]) -> CountedValues:
        """Return the values that a mask selects."""
        copies = self.copies
        return self._replace(values=self.values[mask], sums=None if copies is None else _sums(copies[mask]))

    def with_more(self, values: NDArray[Any], copies: Ints | None) -> CountedValues:
        """Return these values and more values. Either both have numbers of copies, or neither has."""
        every_value: NDArray[Any] = np.concatenate((self.values, values))
        own_copies = self.copies
        assert (own_copies is None) == (copies is None)
        if own_copies is None or copies is None:
            return CountedValues.of(every_value, None, self.weight)
        return CountedValues.of(every_value, np.concatenate((own_copies, copies)), self.weight)


# No pairs.
NO_VALUES = CountedValues(np.empty(0))


def _sums(copies: Ints) -> Ints:
    """Return the sum of each number and all that follow it, and 0."""
    return np.append(np.cumsum(copies[::-1])[::-1], 0)


def first_reaching(values: FloatArray, scores: NDArray[np.float64]) -> Ints:
    """Return, for each of the ascending scores, the position of the first of the ascending values that reaches it.

    Examples:
        >>> first_reaching(np.array([0.1, 0.5, 0.7]), np.array([0.0, 0.5, 0.8])).tolist()
        [0, 1, 3]
    """
    return len(values) - number_reaching(values, scores)


def number_reaching(values: FloatArray, scores: NDArray[np.float64]) -> Ints:
    """Return, for each of the ascending scores, how many of the ascending values reach it.

    Examples:
        >>> number_reaching(np.array([0.1, 0.5, 0.7]), np.array([0.0, 0.5])).tolist()
        [3, 2]
    """
    if SEARCH_PRICE * len(scores) < len(values):
        return len(values) - np.searchsorted(values, scores)
    out = np.empty(len(scores), np.int64)
    # Numba would compile a second loop for an array with strides.
    _merge(values, np.ascontiguousarray(scores), out)
    return out


@kernel
def _merge(values, scores, out):
    """Count how many of the ascending values reach each of the ascending scores."""
    at = 0
    for k in range(scores.shape[0]):
        while at < values.shape[0] and values[at] < scores[k]:
            at += 1
        out[k] = values.shape[0] - at
