"""Calls to the functions of custom metrics, with checks of what they return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._jackknife import OUTSIDE
from fewshot_callbacks.functional.retrieval.decisions import PooledDecisions
from fewshot_callbacks.functional.retrieval.report import with_known_points
from fewshot_callbacks.settings import RequestedMetric, Ties
from fewshot_callbacks.system.words import counted


def call_on_ranks(call: str, requested: RequestedMetric, ranks: RankBlock, ties: Ties) -> Float[Tensor, "queries"]:
    """Return the values of a custom metric for a block of queries; NaN for a query without a relevant candidate."""
    queries = len(ranks.relevant)
    returned = _called(call, requested, ranks, ties=ties)
    try:
        is_list = isinstance(returned, list | tuple)  # torch would round a list's numbers to the default dtype
        values = torch.as_tensor(returned, dtype=torch.float64 if is_list else None)
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    if values.shape != (queries,) or values.is_complex():
        shown = f"a tensor of shape {tuple(values.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise InputError(
            f"{call}: the function of the metric {requested.of_queries!r} returned {shown} for "
            f"{counted(queries, 'query')}. Return one real number for each query: a tensor of shape ({queries},), that is, "
            "(len(ranks.relevant),)."
        )
    return values.double().masked_fill(ranks.relevant.to(values.device) == 0, torch.nan)


def call_on_pairs(call: str, requested: RequestedMetric, pooled: PooledDecisions) -> float:
    """Return the value of a custom metric with the input `pairs`.

    The operating points of the decisions are those that other metrics requested.
    """
    returned = _called(call, requested, with_known_points(pooled))
    try:
        value = float(returned)
    except (TypeError, ValueError):
        raise InputError(
            f"{call}: the function of the metric {requested.key!r} returned {returned!r}. Return a number."
        ) from None
    check_range(call, requested, torch.tensor([value], dtype=torch.float64))
    return value


def check_range(call: str, requested: RequestedMetric, values: Float[Tensor, "values"]) -> None:
    """Refuse values outside the metric's range, because intervals and plots rely on it.

    NaN is always accepted.
    """
    present = values[~values.isnan()]
    if requested.metric.range is None or not len(present):
        return
    low, high = requested.metric.range
    lowest, highest = (float(end) for end in present.aminmax())
    allowed = OUTSIDE * (high - low)
    if lowest < low - allowed or highest > high + allowed:
        raise InputError(
            f"{call}: the metric {requested.of_queries!r} has range={requested.metric.range}, but values from {lowest:g} to "
            f"{highest:g}. Pass Metric(..., range=(lowest, highest)) with its bounds, or range=None if it has no bounds."
        )


def notes_on_nan(
    users_metrics: Sequence[RequestedMetric], values: Mapping[str, float], matched: int
) -> tuple[str, ...]:
    """Return a note on each custom metric that is NaN.

    `matched` is the number of queries that have a match.
    """
    notes = []
    for requested in users_metrics:
        if math.isnan(values[requested.key]):
            scope = f" for all {matched:,} queries with a match" if requested.metric.input == "ranks" else ""
            notes.append(
                f"{requested.key} is NaN: its function returned NaN{scope}. Return a number if the metric is defined, such "
                "as 0 if nothing was found."
            )
    return tuple(notes)


def without_function(requested: RequestedMetric) -> RequestedMetric:
    """Return the metric without its function, so that a report can be pickled."""
    return replace(requested, metric=replace(requested.metric, value=None))


def _called(call: str, requested: RequestedMetric, argument: Any, **keywords: Any) -> Any:
    """Return the result of a metric's function. The error names the metric if the function fails."""
    assert requested.metric.value is not None
    try:
        return requested.metric.value(argument, **keywords, **requested.parameters)
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"{call}: the function of the metric {requested.of_queries!r} failed: {type(error).__name__}: {text}. Correct "
            "the function, or leave the metric out."
        ) from error
