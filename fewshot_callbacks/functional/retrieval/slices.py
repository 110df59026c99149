"""Slices of an evaluation: the queries that have the same value of an attribute, such as the same camera.

A reader looks at all slices of an attribute and picks the worst of them. Therefore, for the confidence level c, each of m
slices has an interval at the level 1 - (1 - c) / m (Bonferroni). All intervals together, including the worst slice's
interval, then contain the true values with a probability of at least c.
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

# This many slices are accepted for any number of classes, since a table of them is still readable.
FEW_SLICES = 30
# More slices need this many classes each, on average. It refuses numbers such as ages, with a value per query.
CLASSES_PER_SLICE = 10


class SlicesError(InputError):
    """Raised if the values of an attribute cannot be used as slices; every process raises the same error.

    `attribute` is None if the error came from another process.
    """

    def __init__(self, message: str, attribute: str | None = None) -> None:
        super().__init__(message)
        self.attribute = attribute


class Attribute(NamedTuple):
    """The slice of each query.

    Attributes:
        codes: Index of each query's slice in `names`.
        names: The slices, ascending.

    Examples:
        >>> import torch
        >>> camera = Attribute(torch.tensor([1, 0, 1]), ("door", "roof"))
        >>> camera.of_queries(torch.tensor([0, 1])).codes
        tensor([1, 0])
    """

    codes: Int[Tensor, "queries"]
    names: tuple[int | str, ...]

    @classmethod
    def of_codes(cls, codes: Int[Tensor, "queries"], names: tuple[Any, ...] | None) -> Attribute:
        """Return the attribute with these codes and names, without unused names. `names=None` takes the codes as names."""
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
    """A metric of the queries in one slice.

    Attributes:
        value: Mean over the queries of the slice; NaN if no query has a value.
        interval: Interval of the value. The report's confidence level applies to the intervals of all slices together.
        queries: Number of queries that have a value, that is, a relevant candidate.
        classes: Number of classes of these queries. The interval treats classes as the independent units.
        share: Fraction of all queries with a value that are in this slice, in [0, 1].

    Examples:
        >>> Slice(0.75, Interval(0.5, 0.875), 40, 10, 0.25).interval.low
        0.5
    """

    value: float
    interval: Interval
    queries: int
    classes: int
    share: float


@runtime_checkable
class _Measured(Protocol):
    """The result for one slice."""

    @property
    def value(self) -> float:
        """A value; NaN if there is none."""


AnyMeasured = TypeVar("AnyMeasured", bound=_Measured)


class MeasuredSlices(dict[int | str, AnyMeasured], Generic[AnyMeasured]):
    """Slice -> its result. `print` shows a table, the worst slice first.

    `confidence` is the joint confidence level of all intervals.
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
        """The slice with the worst value; the first one of several equal slices. Slices without a value come last."""
        return self._ordered()[0]

    def _ordered(self) -> list[int | str]:
        return sorted(self, key=lambda name: (math.isnan(self[name].value), self._sign * self[name].value))

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each slice for a table, the worst slice first."""
        raise NotImplementedError

    @property
    def explanation(self) -> str:
        """The sentences below the table."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Return the lines of a table with one slice per line, the worst slice first."""
        columns = [printable(column) for column in self.columns]
        return table(columns, [(printable(name), *cells) for name, *cells in self.rows()])

    def __str__(self) -> str:
        """Return a table with one slice per line, the worst slice first."""
        return "\n".join([*self.lines(), self.explanation])

    def __repr__(self) -> str:
        return str(self)


class Slices(MeasuredSlices[Slice]):
    """Slice -> a metric of its queries. `print` shows a table, the worst slice first.

    Args:
        slices: Slice -> the metric of its queries.
        attribute: The attribute that the slices are values of.
        requested: The metric.
        confidence: Confidence level of all intervals together.

    Examples:
        >>> from fewshot_callbacks.functional import requested_metric
        >>> roof = Slice(0.5, Interval(0.25, 0.75), 30, 10, 0.75)
        >>> door = Slice(0.75, Interval(0.5, 0.875), 10, 10, 0.25)
        >>> slices = Slices({"door": door, "roof": roof}, "camera", requested_metric("mAP"), 0.95)
        >>> slices.worst, slices["roof"].value
        ('roof', 0.5)
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
        """Return the cells of each slice for a table, the worst slice first."""
        rows: list[tuple[str, ...]] = []
        for name in self._ordered():
            value, interval, queries, classes, share = self[name]
            counts = (f"{queries:,}", f"{classes:,}", f"{100 * share:.1f} %")
            rows.append((str(name), *cells_of(value, interval), *counts))
        return rows

    @property
    def explanation(self) -> str:
        """The sentences below the table."""
        return (
            f"The confidence level of all intervals together is {100 * self.confidence:g} %. The worst slice looks worse "
            "than it is, so judge it by the better end of its interval."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the slices as plain values for JSON, the worst slice first (NaN becomes None)."""
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
    """Return a value and its interval for a table; empty strings in place of NaN."""
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

    `values` are NaN for queries without a value. `confidence` is the joint confidence level of all intervals.
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
    """Return the confidence level of each interval, for a level of all intervals together (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, slices)


def checked_slices(call: str, slices: Any) -> dict[str, Labels]:
    """Return attribute -> its value for each query."""
    if slices is None:
        return {}
    refuse_unnamed_slices(call, slices, 'Pass slices={"camera": cameras}, with a value for each query.')
    return {name: as_labels(values, slices_argument(name), call) for name, values in slices.items()}


def refuse_unnamed_slices(call: str, slices: Any, fix: str) -> None:
    """Refuse anything except a mapping with strings as keys. The message ends with the fix."""
    if not isinstance(slices, Mapping) or not all(isinstance(name, str) for name in slices):
        raise InputError(
            f"{call}: slices is {with_article(type(slices).__name__)}, not a dictionary with strings as keys. {fix}"
        )


def slices_argument(name: str) -> str:
    """Return the name of an attribute in messages."""
    return f"slices[{name!r}]"


def encode_slices(
    call: str, slices: Mapping[str, Labels], processes: Processes
) -> tuple[dict[str, Int[Tensor, "queries"]], dict[str, tuple[Any, ...] | None]]:
    """Return argument name -> code of each query of this process, and attribute -> value of each code. *Collective*.

    The value of each code is None for integers, which are their own codes.
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
    """Refuse an attribute with too many values for useful slices.

    `slices` has the number of values of each attribute. Classes or identities are the independent units; `fact` is
    their number as a clause.
    """
    for name, number in slices.items():
        most = max(FEW_SLICES, classes // CLASSES_PER_SLICE)
        if number > most:
            raise SlicesError(
                f"{call}: {slices_argument(name)} has {counted(number, 'value')}, and {fact}: these slices are too small to "
                f"be useful. Pass at most {most} values: merge some, or divide numbers such as ages into bins.",
                name,
            )
