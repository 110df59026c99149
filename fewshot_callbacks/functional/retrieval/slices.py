"""Slices of an evaluation: the queries that have one value of an attribute, such as one camera.

The slices of an attribute are read together, and the worst of them is chosen by the same numbers. Therefore each of m slices
has an interval at the confidence 1 - (1 - c) / m for the confidence c (Bonferroni). With at least the confidence c, all of
these intervals contain their true values, that of the worst slice too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import LabelFormsError, Labels, as_labels, encode
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.retrieval.query_means import mean_over_queries
from fewshot_callbacks.functional.retrieval.values import or_none
from fewshot_callbacks.functional.statistics import Interval
from fewshot_callbacks.settings import RequestedMetric
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted, with_article

# So many slices are taken whatever the number of classes: a table of them can be read.
FEW_SLICES = 30
# Of more slices, each needs so many classes on average: a number such as an age has about as many values as queries.
CLASSES_PER_SLICE = 10


class SlicesError(InputError):
    """Raised if the values of an attribute cannot be its slices; every process raises the same error.

    Args:
        message: The message.
        attribute: The attribute; None if the error came from another process.
    """

    def __init__(self, message: str, attribute: str | None = None) -> None:
        super().__init__(message)
        self.attribute = attribute


class Attribute(NamedTuple):
    """The slice of each query.

    Examples:
        >>> import torch
        >>> camera = Attribute(torch.tensor([1, 0, 1]), ("door", "roof"))
        >>> camera.of_queries(torch.tensor([0, 1])).codes
        tensor([1, 0])
    """

    codes: Int[Tensor, "queries"]
    """index of the slice of each query among `names`"""
    names: tuple[int | str, ...]
    """the slices, ascending"""

    @classmethod
    def of_codes(cls, codes: Int[Tensor, "queries"], names: tuple[Any, ...] | None) -> Attribute:
        """Return the attribute of codes with these names, without the names that no query has; codes are names if None."""
        present, index = codes.unique(return_inverse=True)
        integers = present.tolist()
        return cls(index, tuple(integers if names is None else [names[code] for code in integers]))

    def of_queries(self, index: Int[Tensor, "chosen"]) -> Attribute:
        """Return the slice of each of these queries."""
        return Attribute(self.codes[index], self.names)

    def values(self) -> list[int | str]:
        """Return the value of each query."""
        return [self.names[code] for code in self.codes.tolist()]


class Slice(NamedTuple):
    """A metric of the queries of a slice.

    Examples:
        >>> Slice(0.75, Interval(0.5, 0.875), 40, 10, 0.25).interval.low
        0.5
    """

    value: float
    """mean over the queries of the slice; NaN if none of them has a value"""
    interval: Interval
    """its interval; those of all slices together have the confidence of the report"""
    queries: int
    """number of queries that have a value, that is, a relevant candidate"""
    classes: int
    """number of their classes, which are the independent units of the interval"""
    share: float
    """their share of all queries that have a value"""


@runtime_checkable
class _Measured(Protocol):
    """What was measured of a slice."""

    @property
    def value(self) -> float:
        """A value; NaN if there is none."""


AnyMeasured = TypeVar("AnyMeasured", bound=_Measured)


class MeasuredSlices(dict[int | str, AnyMeasured], Generic[AnyMeasured]):
    """Slice -> what was measured of it; `print` shows a table, the worst first.

    Args:
        slices: Slice -> what was measured of it.
        attribute: The attribute that has the slices as its values.
        confidence: Confidence of all intervals together.
        lower_is_better: Whether the largest value is the worst.
    """

    def __init__(
        self, slices: Mapping[int | str, AnyMeasured], attribute: str, confidence: float, *, lower_is_better: bool
    ) -> None:
        super().__init__(slices)
        self.attribute = attribute
        self.confidence = confidence
        self._sign = -1 if lower_is_better else 1

    @property
    def worst(self) -> int | str:
        """The slice with the worst value; the first of equal ones. A slice without a value is last."""
        return self._ordered()[0]

    def _ordered(self) -> list[int | str]:
        return sorted(self, key=lambda name: (math.isnan(self[name].value), self._sign * self[name].value))

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each slice, the worst first, for tables."""
        raise NotImplementedError

    @property
    def explanation(self) -> str:
        """Sentences on the table."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Return the lines of a table with one slice in a line, the worst first."""
        columns = [printable(column) for column in self.columns]
        return table(columns, [(printable(name), *cells) for name, *cells in self.rows()])

    def __str__(self) -> str:
        """Return a table with one slice in a line, the worst first."""
        return "\n".join([*self.lines(), self.explanation])

    def __repr__(self) -> str:
        return str(self)


class Slices(MeasuredSlices[Slice]):
    """Slice -> a metric of its queries; `print` shows a table, the worst first.

    Args:
        slices: Slice -> the metric of its queries.
        attribute: The attribute that has the slices as its values.
        requested: The metric.
        confidence: Confidence of all intervals together.

    Examples:
        >>> from fewshot_callbacks.functional import requested_metric
        >>> roof = Slice(0.5, Interval(0.25, 0.75), 30, 10, 0.75)
        >>> door = Slice(0.75, Interval(0.5, 0.875), 10, 10, 0.25)
        >>> slices = Slices({"door": door, "roof": roof}, "camera", requested_metric("mAP"), 0.95)
        >>> slices.worst
        'roof'
    """

    def __init__(
        self, slices: Mapping[int | str, Slice], attribute: str, requested: RequestedMetric, confidence: float
    ) -> None:
        super().__init__(slices, attribute, confidence, lower_is_better=requested.metric.better == "lower")
        self.metric = requested.key

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        return self.attribute, self.metric, "interval", "queries", "classes", "share"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each slice, the worst first, for tables."""
        rows: list[tuple[str, ...]] = []
        for name in self._ordered():
            value, interval, queries, classes, share = self[name]
            counts = (f"{queries:,}", f"{classes:,}", f"{100 * share:.1f} %")
            rows.append((str(name), *cells_of(value, interval), *counts))
        return rows

    @property
    def explanation(self) -> str:
        """Two sentences on the table."""
        return (
            f"All intervals together have {100 * self.confidence:g} % confidence. The worst of several slices looks worse "
            "than it is: judge it by the better end of its interval."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the slices as numbers, strings, lists and dictionaries for JSON, the worst first (NaN becomes None)."""
        return {
            str(name): {
                "value": or_none(self[name].value),
                "interval": [or_none(end) for end in self[name].interval],
                "queries": self[name].queries,
                "classes": self[name].classes,
                "share": self[name].share,
            }
            for name in self._ordered()
        }


def cells_of(value: float, interval: Interval) -> tuple[str, str]:
    """Return a value and its interval for a table; nothing in place of NaN."""
    number = "" if math.isnan(value) else f"{value:.4f}"
    low, high = interval
    return number, "" if math.isnan(low) else f"{low:.4f} to {high:.4f}"


def slices_of(
    name: str,
    attribute: Attribute,
    requested: RequestedMetric,
    values: Float[Tensor, "queries"],
    labels: Int[Tensor, "queries"],
    confidence: float,
) -> Slices:
    """Return a metric of each slice of an attribute.

    Args:
        name: The attribute.
        attribute: The slice of each query.
        requested: The metric.
        values: The metric of each query; NaN where it has none.
        labels: The label of each query.
        confidence: Confidence of all intervals together.
    """
    has_value = ~values.isnan()
    level = confidence_of_each(confidence, len(attribute.codes[has_value].unique()))
    slices = {}
    for code, slice_name in enumerate(attribute.names):
        inside = has_value & (attribute.codes == code)
        queries = int(inside.sum())
        value, interval = mean_over_queries(requested, values[inside], labels[inside], level)
        share = queries / max(1, int(has_value.sum()))
        slices[slice_name] = Slice(value, interval, queries, len(labels[inside].unique()), share)
    return Slices(slices, name, requested, confidence)


def confidence_of_each(confidence: float, slices: int) -> float:
    """Return the confidence of each of several intervals that together have a confidence (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, slices)


def checked_slices(call: str, slices: Any) -> dict[str, Labels]:
    """Return attribute -> its value for each query.

    Raises:
        ValueError: If this is not a mapping, an attribute is not a string, or values are neither integers nor strings.
    """
    if slices is None:
        return {}
    refuse_unnamed_slices(call, slices, 'Pass slices={"camera": cameras}, with a value for each query.')
    return {name: as_labels(values, slices_argument(name), call) for name, values in slices.items()}


def refuse_unnamed_slices(call: str, slices: Any, fix: str) -> None:
    """Refuse anything but a mapping with strings as keys; the message ends with the fix."""
    if not isinstance(slices, Mapping) or not all(isinstance(name, str) for name in slices):
        raise InputError(
            f"{call}: slices is {with_article(type(slices).__name__)}, and must be a dictionary with strings as keys. {fix}"
        )


def slices_argument(name: str) -> str:
    """Return what an attribute is called in messages."""
    return f"slices[{name!r}]"


def encode_slices(
    call: str, slices: Mapping[str, Labels], processes: Processes
) -> tuple[dict[str, Int[Tensor, "queries"]], dict[str, tuple[Any, ...] | None]]:
    """Return a code for each query of this process, by the name of the argument, and the value of each code. *Collective*.

    The values are by the attribute; None for integers, which are their own codes.

    Raises:
        SlicesError: If the values of an attribute are integers in one process and strings in another.
    """
    codes = {}
    names = {}
    for name in sorted(slices):
        argument = slices_argument(name)
        try:
            [codes[argument]], names[name] = encode(call, {argument: slices[name]}, processes)
        except LabelFormsError as error:
            raise SlicesError(str(error), name) from error
    return codes, names


def refuse_many_slices(call: str, slices: Mapping[str, int], classes: int, fact: str) -> None:
    """Refuse an attribute with so many values that their slices say nothing.

    Args:
        call: The public function, for messages.
        slices: Attribute -> number of its values.
        classes: Number of classes or identities, which are the independent units.
        fact: How many there are, for messages.

    Raises:
        SlicesError: If there is such an attribute.
    """
    for name, number in slices.items():
        most = max(FEW_SLICES, classes // CLASSES_PER_SLICE)
        if number > most:
            raise SlicesError(
                f"{call}: {slices_argument(name)} has {counted(number, 'value')}, and {fact}: of so many slices none would "
                f"say anything. Pass at most {most} values: join some, or divide numbers such as ages into bins.",
                name,
            )
